"""One picture of a run: accuracy and reward over wall-clock, with the phases below.

`python -m mugrpo_megatron.report.figure RUN_DIR OUT.svg [--dark]`
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.report.evaluations import interval_in, measure_in, sets_in, value_in
from mugrpo_megatron.report.payload import Drawing, draw
from mugrpo_megatron.report.rundata import RunData, read_run

LANES = ("generate", "optimize")
"""Phases that the picture shows."""
MAX_BOUNDARIES = 16
"""With more stages than this, their boundaries are not drawn: they would hide the curves."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours for a light or a dark background."""

    paper: str
    ink: str
    soft: str
    line: str
    accuracy: str
    reward: str
    generate: str
    optimize: str


LIGHT = Theme("#ffffff", "#14171f", "#565d6d", "#e4e7ec", "#2a6fdb", "#e8742c", "#2a6fdb", "#14936c")
DARK = Theme("#0d1117", "#eceef3", "#a5acba", "#2b313c", "#5b9bff", "#f08a4b", "#5b9bff", "#35b88f")


def write_figure(run_dir: Path, path: Path, *, dark: bool = False) -> Path:
    """Draw the run in `run_dir` into `path`; its suffix (.svg, .png) decides the format.

    Raises UserError as `read_run` does.
    """
    run, theme = read_run(run_dir), DARK if dark else LIGHT
    figure = Figure(figsize=(9.6, 4.4), layout="constrained", facecolor=theme.paper)
    FigureCanvasAgg(figure)
    curves, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    drawing = draw(run)
    _curves(curves, run, theme)
    _lanes(lanes, drawing, theme)
    for axes in (curves, lanes):
        _boundaries(axes, drawing, theme)
    _title(curves, run, theme)
    path.parent.mkdir(parents=True, exist_ok=True)
    undated = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "mugrpo"}):  # the same run gives the same file
        figure.savefig(path, dpi=200, facecolor=theme.paper, metadata=undated)
    return path


def _curves(axes: Axes, run: RunData, theme: Theme) -> None:
    _held_out(axes, run, theme)
    rewards = [
        (run.clock(row["time"]), row["reward_mean"]) for row in run.updates if row.get("reward_mean") is not None
    ]
    axes.plot(
        [time for time, _ in rewards],
        [reward for _, reward in rewards],
        color=theme.reward,
        marker=".",
        markersize=3,
        linestyle="",
        alpha=0.7,
        label="training reward of an update",
    )
    if measure_in(run.evals) == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.legend(loc="lower right", facecolor=theme.paper, edgecolor="none", labelcolor=theme.ink, fontsize=10)
    _plain(axes, theme)


def _held_out(axes: Axes, run: RunData, theme: Theme) -> None:
    """The mean of the held-out sets with its interval; with several sets, a thin line for each."""
    times = [run.clock(row["time"]) for row in run.evals]
    measure, names = measure_in(run.evals), sets_in(run.evals)
    for name in names if len(names) > 1 else ():
        values = [value_in(row, name) for row in run.evals]
        axes.plot(times, values, color=theme.accuracy, linewidth=0.9, alpha=0.55)  # type: ignore[arg-type]
        axes.annotate(name, (times[-1], values[-1]), (5, -3), textcoords="offset points", color=theme.soft, fontsize=8)  # type: ignore[arg-type]
    banded = [(time, interval) for time, row in zip(times, run.evals, strict=True) if (interval := interval_in(row))]
    low, high = ([interval[end] for _, interval in banded] for end in (0, 1))
    axes.fill_between([time for time, _ in banded], low, high, color=theme.accuracy, alpha=0.16, linewidth=0)
    label = f"held-out {measure}" if len(names) <= 1 else f"held-out {measure}, mean of {len(names)} sets"
    means = [value_in(row) for row in run.evals]
    axes.plot(times, means, color=theme.accuracy, linewidth=2, marker="o", markersize=6, label=label)  # type: ignore[arg-type]


def _lanes(axes: Axes, drawing: Drawing, theme: Theme) -> None:
    colors = {"generate": theme.generate, "optimize": theme.optimize}
    for height, name in enumerate(reversed(LANES)):
        spans = [
            (start, end - start)
            for phase, _, start, end in drawing.timeline["spans"]
            if drawing.timeline["phases"][phase] == name
        ]
        axes.broken_barh(spans, (height - 0.34, 0.68), color=colors[name], linewidth=0)
    axes.set_yticks(range(len(LANES)), reversed(LANES))
    axes.set_ylim(-0.6, len(LANES) - 0.4)
    axes.set_xlim(0, 1.01 * drawing.end["t"])
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 1.5, 2, 3, 6, 10]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda seconds, _: f"{seconds:g} s" if seconds < 60 else duration(seconds))
    )
    axes.set_xlabel("wall-clock", color=theme.soft, fontsize=10, loc="right")
    _plain(axes, theme)
    axes.grid(visible=False)


def _boundaries(axes: Axes, drawing: Drawing, theme: Theme) -> None:
    """A line where each stage begins."""
    if len(drawing.boundaries) <= MAX_BOUNDARIES:
        for boundary in drawing.boundaries[1:]:
            axes.axvline(boundary["t"], color=theme.soft, linewidth=0.8, linestyle=(0, (2, 3)), alpha=0.7)


def _title(axes: Axes, run: RunData, theme: Theme) -> None:
    schedule = run.recipe.get("schedule", {})
    name = run.recipe.get("objective", {}).get("name", "")
    title = f"{name}: {schedule.get('stages')} stages of {schedule.get('updates_per_stage')} updates"
    axes.set_title(title, loc="left", color=theme.ink, fontsize=12.5, fontweight="bold", pad=10)


def _plain(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor(theme.paper)
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.soft, length=0, labelsize=10)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(theme.line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw a run for a README.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    print(write_figure(options.run_dir, options.out, dark=options.dark))
