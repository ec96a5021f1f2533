"""All objectives on one sealed stage: the table and the picture of docs/study/objectives.md, from the sweeps' figures.

python -m run_scripts.objectives
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mugrpo_megatron.evaluation.estimators import mean_interval
from run_scripts.svg import LIGHT, plain_axes, write_svg

STUDY = Path(__file__).parents[1] / "docs/study"
PAGE, CELLS, PICTURE = STUDY / "objectives.md", STUDY / "objectives/real.csv", STUDY / "objectives/real.svg"
LOW, HIGH = 1e-5, 2e-5
VETO = "`mu_grpo`"
VARIANTS = {
    ("", "", ""): "",
    ("none", "", ""): ", no veto",
    ("prefix", "", ""): ", `prefix`",
    ("prefix_min", "", ""): ", `prefix_min`",
    ("prefix", "both", ""): ", `prefix`, both signs",
    ("", "", "stage"): ", KL to the stage 0.01",
}
"""`objective.veto`, `objective.prefix_signs` and `objective.kl_ref` where a cell sets them -> the end of its name."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One objective at one rate on one seed's stage."""

    end: float
    """Sampled accuracy, per cent."""
    nats: float
    """The k3 estimate of KL(behaviour | policy) a token at the last update."""
    seconds: float
    """Of the median update."""


Cells = Mapping[tuple[str, float], Mapping[int, Cell]]
"""(objective, rate) -> seed -> cell."""


def read_cells(path: Path, repeat: int = 0) -> dict[tuple[str, float], dict[int, Cell]]:
    """The cells of a draw: `repeat` 1 has the runs whose stages were swept, which are the veto's cells once more."""
    cells: dict[tuple[str, float], dict[int, Cell]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if int(row["repeat"]) != repeat:
                continue
            variant = row["objective.veto"], row["objective.prefix_signs"], row["objective.kl_ref"]
            name = f"`{row['objective.name']}`{VARIANTS[variant]}"
            end, nats, seconds = (float(row[key]) for key in ("after", "kl_k3_last", "seconds_update_median"))
            cell = Cell(100 * end, nats, seconds)
            cells.setdefault((name, float(row["optimizer.lr"])), {})[int(row["seed"])] = cell
    return cells


def mean_end(cells: Iterable[Cell]) -> float:
    return fmean(cell.end for cell in cells)


def better_rate(cells: Cells, name: str) -> float:
    """LOW or HIGH, by the mean end over the seeds that have both; LOW in a tie, and where one seed compares them."""
    seeds = cells[name, LOW].keys() & cells[name, HIGH].keys()
    low, high = (mean_end(cells[name, rate][seed] for seed in seeds) for rate in (LOW, HIGH))
    return HIGH if len(seeds) > 1 and high > low else LOW


def gap(cells: Cells, name: str) -> tuple[float, float]:
    """Points above the veto, both at their better rates, seed by seed: mean and half of its 95 % interval."""
    by_seed, veto = cells[name, better_rate(cells, name)], cells[VETO, better_rate(cells, VETO)]
    interval = mean_interval([by_seed[seed].end - veto[seed].end for seed in sorted(by_seed)])
    return interval.value, interval.high - interval.value


def ordered_names(cells: Cells) -> list[str]:
    """All objectives, the one that ends highest above the veto first."""
    return sorted({name for name, rate in cells if rate == LOW}, key=lambda name: (-gap(cells, name)[0], name))


def table(cells: Cells) -> str:
    lines = [
        "| Objective | 10⁻⁵ | 2·10⁻⁵ | Minus the veto, points | Nats a token | s an update |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name in ordered_names(cells):
        best = cells[name, better_rate(cells, name)]
        value, half = gap(cells, name)
        against = "–" if name == VETO else f"{value:+.1f} ± {half:.1f}{_seeds(best)}"
        figures = zip(*((cell.nats, cell.seconds) for cell in best.values()), strict=True)
        nats, seconds = (f"{median(values):.2f}" for values in figures)
        ends = [
            f"{mean_end(by_seed.values()):.1f}{_seeds(by_seed)}" for by_seed in (cells[name, LOW], cells[name, HIGH])
        ]
        lines.append(f"| {' | '.join([name, *ends, against, nats, seconds])} |")
    return "\n".join(lines)


def _seeds(cells: Mapping[int, Cell]) -> str:
    """The number of seeds where some are missing."""
    return "" if len(cells) == 3 else f" ({len(cells)})"


def draw(cells: Cells, path: Path) -> Path:
    """Every cell against the veto's of its seed at its better rate."""
    names = ordered_names(cells)[::-1]
    figure = Figure(figsize=(8.4, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    veto = cells[VETO, better_rate(cells, VETO)]
    for rate, color, shift, label in ((LOW, "blue", 0.16, "10⁻⁵"), (HIGH, "orange", -0.16, "2·10⁻⁵")):
        for row, name in enumerate(names):
            gaps = [cell.end - veto[seed].end for seed, cell in cells[name, rate].items()]
            axes.plot(gaps, [row + shift] * len(gaps), ".", color=LIGHT[color], alpha=0.5, markersize=5)
            axes.plot(fmean(gaps), row + shift, "D", color=LIGHT[color], markersize=5, label=label if not row else None)
    axes.axvline(0, color=LIGHT["soft"], linewidth=1)
    axes.set_yticks(range(len(names)), [name.replace("`", "") for name in names])
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel("points above mu-GRPO with the veto on the same seed's stage; diamonds: means", color=LIGHT["soft"])
    plain_axes(axes)
    axes.legend(loc="upper left", frameon=False, labelcolor=LIGHT["ink"])
    return write_svg(figure, path)


def with_table(page: str, text: str) -> str:
    """The page with its table replaced."""
    lines = page.split("\n")
    rows = [number for number, line in enumerate(lines) if line.startswith("| ")]
    return "\n".join([*lines[: rows[0]], text, *lines[rows[-1] + 1 :]])


if __name__ == "__main__":
    cells = read_cells(CELLS)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(cells)), encoding="utf-8")
    print(f"{PAGE}, {draw(cells, PICTURE)}")
