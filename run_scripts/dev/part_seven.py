"""Makes the table and the picture of docs/study/part-seven.md from the cells of part seven.

python -m run_scripts.dev.part_seven
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from run_scripts.dev.study import STUDY, interval, plot_gaps, two_panels, with_table
from run_scripts.dev.svg import write_svg

PAGE, PICTURE = STUDY / "part-seven.md", STUDY / "seven.svg"
TUNING = range(100, 104)
WAYS = {
    "grpo": "GRPO, µ=4",
    "stage_veto": "1 stage, veto",
    "stage_product": "1 stage, product",
    "four_product": "4 stages, product",
    "four_veto": "4 stages, veto",
}

Rows = Sequence[Mapping[str, str]]  # the cells of a headroom


def read_cells(headroom: str) -> list[dict[str, str]]:
    with (STUDY / f"seven_{headroom}/cells.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def tuned_rate(rows: Rows, way: str) -> float:
    """The rate with the highest mean end over the tuning seeds, in a tie the lower one; 0 without cells."""
    ends = defaultdict(list)
    for row in rows:
        if row["method"] == way and int(row["seed"]) in TUNING:
            ends[float(row["rate"])].append(float(row["after"]))
    return min(ends, key=lambda rate: (-fmean(ends[rate]), rate), default=0.0)


def figures(rows: Rows, way: str, key: str) -> dict[int, float]:
    """Seed -> a figure of the way's cells at its tuned rate, tuning seeds left out."""
    rate = tuned_rate(rows, way)
    own = [row for row in rows if (row["method"], float(row["rate"])) == (way, rate)]
    return {int(row["seed"]): float(row[key]) for row in own if int(row["seed"]) not in TUNING}


def gaps(rows: Rows, way: str) -> list[float]:
    """Gain over GRPO in points, for each seed."""
    ends, grpo = (figures(rows, name, "after") for name in (way, "grpo"))
    return [100 * (ends[seed] - grpo[seed]) for seed in sorted(ends)]


def table(cells: Mapping[str, Rows]) -> str:
    lines = [
        "| Headroom | Method | Rate, 10⁻⁵ | Before, % | After, % | Minus GRPO, points | Nats a stage |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    ran = [(headroom, rows, way) for headroom, rows in cells.items() for way in WAYS if tuned_rate(rows, way)]
    for headroom, rows, way in ran:
        start, end, nats = (fmean(figures(rows, way, key).values()) for key in ("before", "after", "nats"))
        against = "–" if way == "grpo" else interval(gaps(rows, way))
        ends = f"{100 * start:.1f} | {100 * end:.1f} | {against} | {nats:.2g}"
        lines.append(f"| {headroom} | {WAYS[way]} | {1e5 * tuned_rate(rows, way):g} | {ends} |")
    return "\n".join(lines)


def draw(cells: Mapping[str, Rows], path: Path) -> Path:
    """Draw the end of each cell relative to GRPO's with the same seed, a panel for each headroom."""
    stale = [way for way in WAYS if way != "grpo"]
    label = "points above GRPO on the same seed; diamonds: means"
    figure, panels = two_panels([WAYS[way] for way in stale], [f"{name} headroom" for name in cells], label, 2.4)
    for axes, rows in zip(panels, cells.values(), strict=True):
        plot_gaps(axes, [gaps(rows, way) for way in stale], "blue")
    return write_svg(figure, path)


if __name__ == "__main__":
    cells = {headroom: read_cells(headroom) for headroom in ("small", "large")}
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(cells)), encoding="utf-8")
    print(f"{PAGE}, {draw(cells, PICTURE)}")
