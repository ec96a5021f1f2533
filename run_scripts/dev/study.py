"""The code that the study's pages share: their table, the text of an interval, and a picture of gains seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mugrpo_megatron.evaluation.estimators import mean_interval
from run_scripts.dev.svg import LIGHT, plain_axes

STUDY = Path(__file__).parents[2] / "docs/study"
MARKS = "<!-- cells -->", "<!-- /cells -->"
"""Around what a script writes into a page."""
FEWEST = 3
"""Fewest seeds whose mean part eight shows: an interval over two is wider than any difference of interest."""


def with_table(page: str, text: str) -> str:
    """The text of a page in which `text` replaces the table."""
    lines = page.split("\n")
    first = next(number for number, line in enumerate(lines) if line.startswith("| "))
    end = next((number for number in range(first, len(lines)) if not lines[number].startswith("| ")), len(lines))
    return "\n".join([*lines[:first], text, *lines[end:]])


def with_cells(page: str, text: str) -> str:
    """The page with what stands between its marks replaced."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def interval(values: Sequence[float], sign: str = "+") -> str:
    """The mean of the values with half the width of its 95 % interval (Student's t), as text."""
    mean = mean_interval(values)
    return f"{mean.value:{sign}.1f} ± {mean.high - mean.value:.1f}"


def sign_flip(values: Sequence[float]) -> float:
    """One-sided p of a mean above 0: the share of all patterns of signs whose mean is at least the values' own."""
    sums = [sum(signed) for signed in product(*((value, -value) for value in values))]
    return fmean(total >= sum(values) - 1e-9 for total in sums)


def holm(chances: Sequence[float]) -> list[float]:
    """P values corrected by Holm's method, in their order."""
    ordered = sorted(chances)
    corrected = accumulate((min(1.0, (len(ordered) - rank) * chance) for rank, chance in enumerate(ordered)), max)
    by_chance = dict(zip(ordered, corrected, strict=True))
    return [by_chance[chance] for chance in chances]


def two_panels(rows: Sequence[str], titles: Sequence[str], label: str, height: float) -> tuple[Figure, Sequence[Axes]]:
    """Make a figure of two panels with the same named rows, the first of which is on top."""
    figure = Figure(figsize=(9.6, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].set_ylim(len(rows) - 0.3, -0.7)
    for axes, title in zip(panels, titles, strict=True):
        plain_axes(axes)
        axes.axvline(0, color=LIGHT["soft"], linewidth=1)
        axes.set_title(title, loc="left", color=LIGHT["ink"], fontsize=11)
        axes.set_xlabel(label, color=LIGHT["soft"])
    return figure, panels


def plot_gaps(axes: Axes, rows: Sequence[Sequence[float]], color: str, shift: float = 0.0, label: str = "") -> None:
    """Draw a point for each seed and a diamond at their mean, row by row, `shift` rows lower; a row may be empty."""
    for row, gaps in enumerate(rows):
        axes.plot(gaps, [row + shift] * len(gaps), ".", color=LIGHT[color], alpha=0.5, markersize=5)
    means = {row + shift: fmean(gaps) for row, gaps in enumerate(rows) if gaps}
    axes.plot(list(means.values()), list(means), "D", color=LIGHT[color], markersize=5, label=label)
