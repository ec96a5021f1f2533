"""The law's picture, docs/study/law.svg: the gap to GRPO against the nats that a stage moves a response.

python -m run_scripts.study.law_plots
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from run_scripts.study.law_figures import BINS, Bin, Point, bins_of, law_points, read
from run_scripts.study.plots import frame
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
    axes = figure.subplot_mosaic([["all", "all", "all"], ["gap", "errors", "bins"]])
    _draw_all(axes["all"], study, law_points(rows))
    _draw_gap(axes["gap"], rows)
    _draw_errors(axes["errors"], rows)
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
    nats_frame(
        axes, "Points below GRPO, greedy, every cell", "nats a response, mean over the last 64 updates (log scale)"
    )
    axes.legend(frameon=False, labelcolor=LIGHT["ink"], fontsize=9, ncols=2, loc="lower right")


def _draw_gap(axes: Axes, rows: Sequence[Row]) -> None:
    """Sampled gap, with its interval over problems, against the nats at the end of a stage."""
    for start, own in _compared(rows):
        color, share = LIGHT[COLORS[start]], f"from {100 * own[0]['start_sampled']:.0f} % sampled"
        xs, ys = [row["nats"] for row in own], [100 * row["gap"] for row in own]
        halves = [100 * row["gap_half"] for row in own]
        axes.errorbar(xs, ys, halves, color=color, linewidth=0, elinewidth=1, marker="o", markersize=5, label=share)
        _numbers(axes, own, ys)
    axes.axhline(0, color=LIGHT["soft"], linewidth=1, linestyle="--")
    nats_frame(axes, "Points below GRPO, sampled", "nats a response at a stage's end\nnumbers: stages")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=LIGHT["ink"], fontsize=8.5, loc="lower right")


def _draw_errors(axes: Axes, rows: Sequence[Row]) -> None:
    """Sampled errors at the end, as a multiple of those of GRPO from the same warm start."""
    for start, own in _compared(rows):
        ys = [(1 - row["sampled"]) / (1 - row["sampled"] - row["gap"]) for row in own]
        axes.scatter([row["nats"] for row in own], ys, s=28, color=LIGHT[COLORS[start]], linewidths=0)
        _numbers(axes, own, ys)
    axes.axhline(1, color=LIGHT["soft"], linewidth=1, linestyle="--")
    nats_frame(axes, "Errors, GRPO's = 1, sampled", "nats a response at a stage's end")


def _compared(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Warm start -> its cells that are compared with GRPO, by rising nats."""
    for start in COLORS:
        own = [row for row in rows if row["start"] == start and row["gap"] is not None]
        if own:
            yield start, sorted(own, key=lambda row: row["nats"])


def _numbers(axes: Axes, rows: Sequence[Row], ys: Sequence[float]) -> None:
    """The number of stages beside each point."""
    for row, y in zip(rows, ys, strict=True):
        place = (row["nats"], y)
        name = f"{row['stages']:.0f}"
        axes.annotate(name, place, (5, 3), textcoords="offset points", fontsize=8, color=LIGHT["soft"])


def _draw_bins(axes: Axes, bins: Sequence[Bin]) -> None:
    """E1: sampled gap of one stage by the warm start's pass rate, with the interval over problems."""
    for place, one in enumerate(bins):
        axes.errorbar([place], [one.gap], [one.half], color=LIGHT["orange"], marker="o", markersize=7, linewidth=2)
    labels = [f"{one.low:g} to {one.high:g}\n({one.problems})" for one in bins]
    axes.set_xticks(range(len(bins)), labels)
    axes.set_xlim(-0.5, len(BINS) - 0.5)
    axes.axhline(0, color=LIGHT["soft"], linewidth=1, linestyle="--")
    frame(axes, "One stage: points, by problem", "pass rate of the warm start (problems)")


def nats_frame(axes: Axes, title: str, x: str) -> None:
    """The frame of a panel whose horizontal axis is nats, on a log scale."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in TICKS]))
    axes.xaxis.set_minor_locator(NullLocator())
    frame(axes, title, x)


if __name__ == "__main__":
    sys.exit(main())
