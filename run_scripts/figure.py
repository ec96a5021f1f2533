"""A run as one picture for a page: accuracy and reward over wall-clock, and the phases that take turns below them.

python -m run_scripts.figure RUN_DIR OUT.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.results import interval_in, measure_in, sets_in, value_in
from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.report.drawing import Drawing, draw
from run_scripts.svg import LIGHT, plain_axes, write_svg

LANES = {"generate": LIGHT["blue"], "optimize": LIGHT["green"]}
"""Phases that the picture shows, with their colours."""
MAX_BOUNDARIES = 16
"""With more stages than this, their boundaries would hide the curves."""


def write_figure(run_dir: Path, path: Path) -> Path:
    """Draw the run in `run_dir` as the SVG file `path`. Raises UserError as `read_run` does."""
    run = read_run(run_dir)
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    curves, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    drawing = draw(run)
    _curves(curves, run)
    _lanes(lanes, drawing)
    for axes in (curves, lanes):
        _boundaries(axes, drawing)
    _title(curves, run)
    return write_svg(figure, path)


def _curves(axes: Axes, run: RunData) -> None:
    _held_out(axes, run)
    rewards = [
        (run.clock(row["time"]), row["reward_mean"]) for row in run.updates if row.get("reward_mean") is not None
    ]
    axes.plot(
        [time for time, _ in rewards],
        [reward for _, reward in rewards],
        color=LIGHT["orange"],
        marker=".",
        markersize=3,
        linestyle="",
        alpha=0.7,
        label="training reward of an update",
    )
    _called(axes, run)
    if measure_in(run.evals) == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    # Beside the title, because curves end in every corner.
    style = {"labelcolor": LIGHT["ink"], "fontsize": 9, "columnspacing": 1.2, "handlelength": 1.4, "handletextpad": 0.5}
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, **style)
    plain_axes(axes)


def _called(axes: Axes, run: RunData) -> None:
    """The share of held-out episodes that call a tool, where responses are episodes."""
    for name in sets_in(run.evals):
        points = [(run.clock(row["time"]), row[f"called/{name}"]) for row in run.evals if f"called/{name}" in row]
        if points:
            times, shares = zip(*points, strict=True)
            axes.plot(times, shares, color=LIGHT["green"], linestyle="--", marker="s", label="calls a tool")


def _held_out(axes: Axes, run: RunData) -> None:
    """The mean of the held-out sets with its interval, over thin lines of the sets where there are several."""
    times = [run.clock(row["time"]) for row in run.evals]
    measure, names = measure_in(run.evals), sets_in(run.evals)
    for name in names if len(names) > 1 else ():
        values = [value_in(row, name) for row in run.evals]
        axes.plot(times, values, color=LIGHT["blue"], linewidth=0.9, alpha=0.55)  # type: ignore[arg-type]
        axes.annotate(
            name, (times[-1], values[-1]), (5, -3), textcoords="offset points", color=LIGHT["soft"], fontsize=8
        )  # type: ignore[arg-type]
    banded = [(time, interval) for time, row in zip(times, run.evals, strict=True) if (interval := interval_in(row))]
    low, high = ([interval[end] for _, interval in banded] for end in (0, 1))
    axes.fill_between([time for time, _ in banded], low, high, color=LIGHT["blue"], alpha=0.16, linewidth=0)
    label = f"held-out {measure}" if len(names) <= 1 else f"held-out {measure}, mean of {len(names)} sets"
    means = [value_in(row) for row in run.evals]
    axes.plot(times, means, color=LIGHT["blue"], linewidth=2, marker="o", markersize=6, label=label)  # type: ignore[arg-type]


def _lanes(axes: Axes, drawing: Drawing) -> None:
    for height, (name, color) in enumerate(reversed(LANES.items())):
        spans = [
            (start, end - start)
            for phase, _, start, end in drawing.timeline["spans"]
            if drawing.timeline["phases"][phase] == name
        ]
        axes.broken_barh(spans, (height - 0.34, 0.68), color=color, linewidth=0)
    axes.set_yticks(range(len(LANES)), list(reversed(LANES)))
    axes.set_ylim(-0.6, len(LANES) - 0.4)
    axes.set_xlim(0, 1.01 * drawing.end["t"])
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 1.5, 2, 3, 6, 10]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda seconds, _: f"{seconds:g} s" if seconds < 60 else duration(seconds))
    )
    axes.set_xlabel("wall-clock", color=LIGHT["soft"], fontsize=10, loc="right")
    plain_axes(axes)
    axes.grid(visible=False)


def _boundaries(axes: Axes, drawing: Drawing) -> None:
    """A line where each stage begins, up to `MAX_BOUNDARIES`."""
    if len(drawing.boundaries) <= MAX_BOUNDARIES:
        for boundary in drawing.boundaries[1:]:
            axes.axvline(boundary["t"], color=LIGHT["soft"], linewidth=0.8, linestyle=(0, (2, 3)), alpha=0.7)


def _title(axes: Axes, run: RunData) -> None:
    schedule = run.recipe.get("schedule", {})
    name = run.recipe.get("objective", {}).get("name", "")
    stages = schedule.get("stages")
    title = f"{name}: {stages} stage{'s' * (stages != 1)} of {schedule.get('updates_per_stage')} updates"
    axes.set_title(title, loc="left", color=LIGHT["ink"], fontsize=12.5, fontweight="bold", pad=10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(write_figure(options.run_dir, options.out))
