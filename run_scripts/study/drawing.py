"""What the study's pictures share: colours for light and dark pages, axes, lines with intervals, dots for seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from mugrpo_megatron.report.figure import DARK, LIGHT, Theme
from run_scripts.study.stats import Mean, mean_of

WIDTH = 9.6
WINDOW = 4
"""Updates that a point of a noisy curve is the mean of."""


@dataclass(frozen=True, slots=True)
class Look:
    """One background's colours."""

    theme: Theme
    series: dict[str, str]
    phases: dict[str, str]


LOOKS = {
    "light": Look(
        LIGHT,
        {"blue": "#2a6fdb", "orange": "#d9621c", "green": "#0f8660", "red": "#c4314b", "violet": "#7a4fd0"},
        {"generate": "#2a6fdb", "optimize": "#14936c", "other": "#b9bfca"},
    ),
    "dark": Look(
        DARK,
        {"blue": "#5b9bff", "orange": "#f08a4b", "green": "#35b88f", "red": "#f2708a", "violet": "#a98bf0"},
        {"generate": "#5b9bff", "optimize": "#35b88f", "other": "#59616f"},
    ),
}


def figure(look: Look, *, columns: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure and its axes side by side; `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=look.theme.paper)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def line(axes: Axes, xs: Sequence[float], means: Sequence[Mean], color: str, label: str) -> None:
    """Means over seeds as a line in a band of their intervals."""
    values = [mean.value for mean in means]
    halves = [mean.half or 0.0 for mean in means]
    low, high = ([v + sign * h for v, h in zip(values, halves, strict=True)] for sign in (-1, 1))
    axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(xs, values, color=color, linewidth=2, marker="o", markersize=4, label=label)


def seeds(axes: Axes, x: float, values: Sequence[float], color: str) -> None:
    """A dot for every seed, and a larger one for their mean."""
    axes.scatter([x] * len(values), values, color=color, s=22, alpha=0.45, linewidths=0)
    if values:
        axes.scatter([x], [mean_of(values).value], color=color, s=64)


def windows(values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Centres and means of windows of `WINDOW` updates, without those that have no value."""
    blocks = [(i, [v for v in values[i : i + WINDOW] if v is not None]) for i in range(0, len(values), WINDOW)]
    return [i + WINDOW / 2 for i, block in blocks if block], [sum(block) / len(block) for _, block in blocks if block]


def title(axes: Axes, look: Look, text: str) -> None:
    """A heading at the left."""
    axes.set_title(text, loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")


def percent(axes: Axes) -> None:
    """Fractions as per cent on the vertical axis."""
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(6))


def rates(axes: Axes, places: Iterable[float]) -> None:
    """Learning rates on a logarithmic axis in units of 10⁻⁴, a tick at each of `places` alone."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{1e4 * x:g}"))


def finish(axes: Axes, look: Look, *, x: str) -> None:
    """Grid, spines and colours, and what the horizontal axis says."""
    theme = look.theme
    axes.set_facecolor(theme.paper)
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=theme.soft, length=0, labelsize=9.5)
    axes.set_xlabel(x, color=theme.soft, fontsize=9.5)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(theme.line)


def legend(axes: Axes, look: Look) -> None:
    """A legend where anything is labelled."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(facecolor=look.theme.paper, edgecolor="none", labelcolor=look.theme.ink, fontsize=9)
