"""The law's picture, docs/study/law.svg: the gap to GRPO against the nats that a stage moves a response.

python -m run_scripts.study.law_plots
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from run_scripts.study.law_figures import BINS, FRESH, FRESH_RATE, Bin, Point, bins_of, law_points, read
from run_scripts.study.results import DOCS, Row
from run_scripts.svg import LIGHT, write_svg

NAME = "law"
COLORS = {"start-42": "red", "start-58": "orange", "start-62": "blue", "start-88": "green"}
"""Warm start -> colour."""
TICKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


def main() -> int:
    study, rows, problems = read()
    write_svg(law(study, rows, bins_of(problems)), DOCS / f"{NAME}.svg")
    return 0


def law(study: Sequence[Point], rows: Sequence[Row], bins: Sequence[Bin]) -> Figure:
    """All cells; the law's own cells with the nats at the ends of their stages; and E1."""
    figure = Figure(figsize=(9.6, 7.2), layout="constrained", facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["all", "all"], ["own", "bins"]])
    _draw_all(axes["all"], study, law_points(rows))
    _draw_own(axes["own"], rows)
    _draw_bins(axes["bins"], bins)
    return figure


def _draw_all(axes: Axes, study: Sequence[Point], own: Sequence[Point]) -> None:
    """Greedy gap against the nats over the run's last 64 updates, of every cell."""
    groups = (
        ("GRPO's clip, one stage", "violet", [p for p in study if p.method == "strict"]),
        ("relaxed clip, one stage", "grey", [p for p in study if p.method != "strict" and p.phases == 1]),
        ("several stages", "soft", [p for p in study if p.phases > 1]),
    )
    for label, color, points in groups:
        xs, ys = [p.late for p in points], [p.gap for p in points]
        axes.scatter(xs, ys, s=16, color=LIGHT[color], alpha=0.75, linewidths=0, label=label)
    for start, color in COLORS.items():
        points = [p for p in own if p.start == start]
        if points:
            xs, ys = [p.late for p in points], [p.gap for p in points]
            axes.scatter(xs, ys, s=40, color=LIGHT[color], linewidths=0, label=start)
    axes.axhline(0, color=LIGHT["soft"], linewidth=1, linestyle="--")
    axes.set_yscale("symlog", linthresh=10)
    axes.yaxis.set_major_locator(FixedLocator([-5, 0, 5, 10, 20, 40, 80]))
    axes.yaxis.set_major_formatter(FixedFormatter(["-5", "0", "5", "10", "20", "40", "80"]))
    axes.yaxis.set_minor_locator(NullLocator())
    _finish(axes, "Points below GRPO, greedy, every cell", "nats a response, mean over the last 64 updates (log scale)")
    axes.legend(frameon=False, labelcolor=LIGHT["ink"], fontsize=9, ncols=2, loc="upper left")


def _draw_own(axes: Axes, rows: Sequence[Row]) -> None:
    """Sampled gap against the nats at the end of a stage, mean over stages, of the law's cells."""
    fresh = {
        row["start"]: row for row in rows if (row["method"], row["rate"]) == (FRESH, FRESH_RATE) and row["sampled"]
    }
    for start, color in COLORS.items():
        own = [row for row in rows if row["start"] == start and row["sampled"] and start in fresh]
        own.sort(key=lambda row: row["nats"])
        xs = [row["nats"] for row in own]
        ys = [100 * (fresh[start]["sampled"] - row["sampled"]) for row in own]
        share = f"{100 * own[0]['start_sampled']:.0f} % sampled" if own else ""
        same = [(x, y) for x, y, row in zip(xs, ys, own, strict=True) if row["rate"] == FRESH_RATE]
        if len(same) > 1:
            axes.plot(*zip(*same, strict=True), color=LIGHT[color], linewidth=1, alpha=0.6)
        if own:
            axes.scatter(xs, ys, s=36, color=LIGHT[color], linewidths=0, label=f"from {share}")
        for x, y, row in zip(xs, ys, own, strict=True):
            name = "GRPO" if row["method"] == FRESH else f"{row['stages']:.0f}"
            axes.annotate(name, (x, y), (4, 4), textcoords="offset points", fontsize=8, color=LIGHT["soft"])
    axes.axhline(0, color=LIGHT["soft"], linewidth=1, linestyle="--")
    _finish(axes, "Points below GRPO, sampled", "nats a response at a stage's end (log scale)\nnumbers: stages")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=LIGHT["ink"], fontsize=9, loc="upper left")


def _draw_bins(axes: Axes, bins: Sequence[Bin]) -> None:
    """E1: sampled gap of one stage by the warm start's pass rate, with the interval over problems."""
    for place, one in enumerate(bins):
        axes.errorbar([place], [one.gap], [one.half], color=LIGHT["orange"], marker="o", markersize=7, linewidth=2)
    labels = [f"{one.low:g} to {one.high:g}\n{one.problems} problems" for one in bins]
    axes.set_xticks(range(len(bins)), labels)
    axes.set_xlim(-0.5, len(BINS) - 0.5)
    axes.axhline(0, color=LIGHT["soft"], linewidth=1, linestyle="--")
    _finish(axes, "One stage: points below GRPO", "pass rate of the warm start", log=False)


def _finish(axes: Axes, title: str, x: str, *, log: bool = True) -> None:
    """Heading, horizontal axis, grid and colours."""
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(TICKS))
        axes.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in TICKS]))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(title, loc="left", color=LIGHT["ink"], fontsize=11, fontweight="bold")
    axes.set_facecolor(LIGHT["paper"])
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=LIGHT["soft"], length=0, labelsize=9.5)
    axes.set_xlabel(x, color=LIGHT["soft"], fontsize=9.5)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(LIGHT["line"])


if __name__ == "__main__":
    sys.exit(main())
