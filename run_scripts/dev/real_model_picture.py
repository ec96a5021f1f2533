"""Draws README's picture of a real model: accuracy before and after 48 updates, from docs/study/real_model.csv.

python -m run_scripts.dev.real_model_picture

It cannot show accuracy over time: the csv has no evaluation between the two, and its seconds are from eight runs that
shared a GPU.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from run_scripts.dev.study import STUDY
from run_scripts.dev.svg import LIGHT, plain_axes, write_svg

PICTURE = STUDY / "real_model.svg"
WAYS = {
    "grpo": ("GRPO, 12 stages", "grey"),
    "8-veto": ("mu-GRPO, 8 stages", "blue"),
    "4-veto": ("mu-GRPO, 4 stages", "blue"),
    "8-prefix": ("8 stages, prefix weights", "violet"),
    "4-prefix": ("4 stages, prefix weights", "violet"),
}
"""Way in the csv -> its title and its colour."""
SEEDS = ("0", "1", "2")
SPREAD = 0.26
"""Distance between two seeds of a way in the picture, in rows."""

Rows = Sequence[Mapping[str, str]]


def read_rows() -> Rows:
    with (STUDY / "real_model.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw(rows: Rows, path: Path) -> Path:
    """Draw a row for each way: for each seed a line from the accuracy before to the one after, with its interval."""
    figure = Figure(figsize=(8.4, 3.5), layout="constrained")
    axes = figure.subplots()
    plain_axes(axes)
    axes.grid(axis="x", color=LIGHT["line"], linewidth=0.8)
    axes.grid(visible=False, axis="y")
    for place, (way, (_, color)) in enumerate(WAYS.items()):
        for order, seed in enumerate(SEEDS):
            (row,) = [row for row in rows if (row["way"], row["seed"]) == (way, seed)]
            start, end, low, high = (100 * float(row[key]) for key in ("start", "end", "end_low", "end_high"))
            height = place + SPREAD * (order - 1)
            axes.plot([start, end], [height, height], color=LIGHT[color], linewidth=2.2, solid_capstyle="round")
            axes.plot([low, high], [height, height], color=LIGHT["ink"], linewidth=0.9)
            axes.plot([start], [height], "o", markersize=4, color=LIGHT["soft"])
            axes.plot([end], [height], "o", markersize=6, color=LIGHT[color])
    axes.set_yticks(range(len(WAYS)), [title for title, _ in WAYS.values()])
    axes.set_ylim(len(WAYS) - 0.5, -0.5)
    axes.set_xlim(30, 82)
    axes.set_xlabel(
        "% right on 480 held-out sums: before (small dot), after 48 updates, 95 % interval; three seeds",
        color=LIGHT["soft"],
        fontsize=10,
    )
    return write_svg(figure, path)


if __name__ == "__main__":
    print(draw(read_rows(), PICTURE))
