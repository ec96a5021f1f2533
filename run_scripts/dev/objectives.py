"""Makes the table and the picture of docs/study/objectives.md: all objectives on the same sealed stages.

python -m run_scripts.dev.objectives
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from run_scripts.dev.study import STUDY, interval, plot_gaps, two_panels, with_table
from run_scripts.dev.svg import LIGHT, write_svg

PAGE, PICTURE = STUDY / "objectives.md", STUDY / "objectives.svg"
REAL, CHAIN = STUDY / "objectives/real.csv", STUDY / "objectives/chain.csv"
VETO = "`mu_grpo`"
VARIANTS = {
    ("", "", ""): "",
    ("none", "", ""): ", no veto",
    ("prefix", "", ""): ", `prefix`",
    ("prefix_min", "", ""): ", `prefix_min`",
    ("prefix", "both", ""): ", `prefix`, both signs",
    ("", "", "stage"): ", KL to the stage 0.01",
}
"""(`objective.veto`, `objective.prefix_signs`, `objective.kl_ref`), as far as a cell sets them -> the end of its
name."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one objective at one learning rate, on the stage of one seed."""

    end: float
    """Accuracy at the end with sampled responses, in per cent."""
    nats: float
    """The k3 estimate of KL(behaviour | policy) a token at the last update."""
    seconds: float
    """Seconds of an update (median)."""


Cells = Mapping[tuple[str, float], Mapping[int, Cell]]
"""(objective, rate) -> seed -> cell."""


def read_cells(path: Path, end: str = "after", repeat: int = 0) -> dict[tuple[str, float], dict[int, Cell]]:
    """Read the cells of a file. With `repeat` 1 these are the runs whose stages were swept, which repeat the veto's
    cells.

    `end` is the column with the accuracy at the end; in `after_8` it is from eight samples of each problem.
    """
    cells: dict[tuple[str, float], dict[int, Cell]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if int(row["repeat"]) != repeat:
                continue
            variant = row["objective.veto"], row["objective.prefix_signs"], row["objective.kl_ref"]
            name = f"`{row['objective.name']}`{VARIANTS[variant]}"
            accuracy, nats, seconds = (float(row[key]) for key in (end, "kl_k3_last", "seconds_update_median"))
            cell = Cell(100 * accuracy, nats, seconds)
            cells.setdefault((name, float(row["optimizer.lr"])), {})[int(row["seed"])] = cell
    return cells


def two_rates(cells: Cells) -> tuple[float, float]:
    """The two highest rates. At lower ones some objectives have not run."""
    low, high = sorted({rate for _, rate in cells})[-2:]
    return low, high


def better_rate(cells: Cells, name: str) -> float:
    """The rate of the two with the higher mean end over the seeds that have both; the lower one if few seeds have
    both."""
    low, high = two_rates(cells)
    seeds = cells[name, low].keys() & cells[name, high].keys()
    ends = [fmean(cells[name, rate][seed].end for seed in seeds) for rate in (low, high)]
    return high if 2 * len(seeds) > len(cells[name, low]) and ends[1] > ends[0] else low


def gaps(cells: Cells, name: str, rate: float) -> list[float]:
    """Gain over the veto at its better rate in points, for each seed."""
    by_seed, veto = cells[name, rate], cells[VETO, better_rate(cells, VETO)]
    return [by_seed[seed].end - veto[seed].end for seed in sorted(by_seed)]


def ordered_names(cells: Cells) -> list[str]:
    """The names of all objectives, sorted by their gain over the veto, the largest first."""
    names = {name for name, _ in cells}
    return sorted(names, key=lambda name: (-fmean(gaps(cells, name, better_rate(cells, name))), name))


def table(real: Cells, chain: Cells) -> str:
    lines = [
        "| Objective | SmolLM2 at 10⁻⁵ | SmolLM2 at 2·10⁻⁵ | Minus the veto, points | Nats a token | Seconds an update "
        "| `chain` at 2·10⁻⁵ | `chain` at 4·10⁻⁵ |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for name in ordered_names(real):
        rate = better_rate(real, name)
        best = real[name, rate]
        against = "–" if name == VETO else f"{interval(gaps(real, name, rate))}{_fewer_seeds(real, name, rate)}"
        figures = zip(*((cell.nats, cell.seconds) for cell in best.values()), strict=True)
        nats, seconds = (f"{median(values):.2f}" for values in figures)
        low, high, *chains = (_end(cells, name, rate) for cells in (real, chain) for rate in two_rates(cells))
        lines.append(f"| {' | '.join([name, low, high, against, nats, seconds, *chains])} |")
    return "\n".join(lines)


def _end(cells: Cells, name: str, rate: float) -> str:
    return f"{fmean(cell.end for cell in cells[name, rate].values()):.1f}{_fewer_seeds(cells, name, rate)}"


def _fewer_seeds(cells: Cells, name: str, rate: float) -> str:
    """The number of seeds in parentheses, if some are missing; else ""."""
    seeds = len(cells[name, rate])
    return "" if seeds == max(map(len, cells.values())) else f" ({seeds})"


def draw(real: Cells, chain: Cells, path: Path) -> Path:
    """Draw each cell relative to the veto's with the same seed at its better rate, a panel for each model."""
    names = ordered_names(real)
    label = "points above the veto on the same stage"
    figure, panels = two_panels([name.replace("`", "") for name in names], ("SmolLM2-135M", "chain"), label, 7.2)
    for axes, cells in zip(panels, (real, chain), strict=True):
        for rate, color, shift in zip(two_rates(cells), ("blue", "orange"), (-0.16, 0.16), strict=True):
            plot_gaps(axes, [gaps(cells, name, rate) for name in names], color, shift, f"{1e5 * rate:.0f}·10⁻⁵")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, labelcolor=LIGHT["ink"])
    return write_svg(figure, path)


if __name__ == "__main__":
    real, chain = read_cells(REAL), read_cells(CHAIN, "after_8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(real, chain)), encoding="utf-8")
    print(f"{PAGE}, {draw(real, chain, PICTURE)}")
