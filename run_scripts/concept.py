"""The idea as one picture: stages and staleness under two schedules, and what the veto drops from a response.

python -m run_scripts.concept docs/concept.svg
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from run_scripts.svg import LIGHT, write_svg

UPDATES = 64
"""Updates that the sketch shows of each schedule; both generate as many responses."""
SWITCH = 0.35
"""Width of a switch between engine and learner, in updates."""
RATIOS = ("1.0", "0.9", "1.1", "0.00003", "1.0", "1.2", "0.00001", "0.9", "1.0")
"""Importance ratios of a response with negative advantage."""
THRESHOLD = 1e-4


def write_concept(path: Path) -> Path:
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    grpo, mu, tokens = figure.subplots(3, 1, height_ratios=(2, 2, 1.6))
    _schedule(grpo, "GRPO: 16 stages of µ = 4", 4)
    _schedule(mu, "mu-GRPO: 2 stages of µ = 32", 32)
    for index, (name, color) in enumerate((("generate", "blue"), ("optimize", "green"), ("staleness", "orange"))):
        grpo.text(0.7 + 0.11 * index, 1.07, name, color=LIGHT[color], fontsize=9.5, transform=grpo.transAxes)
    _tokens(tokens)
    return write_svg(figure, path)


def _schedule(axes: Axes, title: str, mu: int) -> None:
    """Blocks of generation and optimization over time, and the staleness of the responses above them."""
    time = 0.0
    for _ in range(UPDATES // mu):
        axes.add_patch(Rectangle((time, -0.75), 0.6 * mu, 0.6, color=LIGHT["blue"], linewidth=0))
        time += 0.6 * mu + SWITCH
        axes.add_patch(Rectangle((time, -0.75), mu, 0.6, color=LIGHT["green"], linewidth=0))
        axes.plot([time, time + mu], [0, mu / 32], color=LIGHT["orange"], linewidth=1.5)
        time += mu + SWITCH
    axes.set_xlim(-1, 1.6 * UPDATES + 2 * SWITCH * UPDATES / 4 + 1)
    axes.set_ylim(-0.9, 1.15)
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=LIGHT["ink"])
    axes.set_axis_off()


def _tokens(axes: Axes) -> None:
    """The tokens of one response: those in the loss, triggers, and what H_κ drops after the first trigger."""
    triggers = [float(ratio) < THRESHOLD for ratio in RATIOS]
    first = triggers.index(True)
    for index, (ratio, trigger) in enumerate(zip(RATIOS, triggers, strict=True)):
        color = "red" if trigger else "grey" if index > first else "green"
        axes.add_patch(Rectangle((index, 0), 0.92, 0.8, color=LIGHT[color], linewidth=0, alpha=0.85))
        axes.text(index + 0.46, 0.4, ratio, color=LIGHT["ink"], fontsize=9, ha="center", va="center")
    dropped = "dropped: π no longer reaches this prefix"
    notes = ((0.0, "in the loss"), (float(first), "κ: first trigger"), (first + 1.1, dropped))
    for start, note in notes:
        axes.text(start, -0.2, note, color=LIGHT["soft"], fontsize=9, ha="left", va="top")
    axes.set_title(
        "The veto: importance ratios of a response with negative advantage",
        loc="left",
        fontsize=10.5,
        fontweight="bold",
        color=LIGHT["ink"],
    )
    axes.set_xlim(-0.1, len(RATIOS))
    axes.set_ylim(-0.7, 0.9)
    axes.set_axis_off()


def main(arguments: Sequence[str] | None = None) -> int:
    (path,) = sys.argv[1:] if arguments is None else arguments
    print(write_concept(Path(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
