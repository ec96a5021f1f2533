"""Part six's picture, docs/study/six.svg: gaps to GRPO by seed and by problem, and the law over all cells.

python -m run_scripts.study.six_plots
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from run_scripts.study import six_passes
from run_scripts.study.law_figures import BINS, Bin
from run_scripts.study.law_formula import FITTED, PREDICTED, Gap, Law, fit, fitted, read
from run_scripts.study.law_plots import nats_frame
from run_scripts.study.plots import frame, spread
from run_scripts.study.results import DOCS, mean_of
from run_scripts.study.six import BOUND
from run_scripts.svg import LIGHT, write_svg

NAME = "six"
COLORS = {"stage": "green", "rule": "blue", "eight": "orange"}
"""Method of part six -> its colour."""
EDGE = (0.02, 6.0)
"""Nats at which the law's curve begins and ends."""


def main() -> int:
    write_svg(six(*read(DOCS), six_passes.read(DOCS)), DOCS / f"{NAME}.svg")
    return 0


def six(explored: Sequence[Gap], grids: dict[str, list[Gap]], passes: Mapping[int, Sequence[Bin]]) -> Figure:
    """The gaps of part six's two grids, claim 6's by problem, and every cell as a share of its warm start's errors."""
    figure = Figure(figsize=(9.6, 7.2), layout="constrained", facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["six_small", "six_large", "passes"], ["law", "law", "law"]])
    for name, headroom in zip(FITTED, ("Small", "Large"), strict=True):
        _draw_gaps(panels[name], f"{headroom} headroom", grids[name])
    _draw_passes(panels["passes"], passes)
    _draw_law(panels["law"], fit(fitted(explored, grids)), explored, grids)
    return figure


def _draw_gaps(axes: Axes, title: str, cells: Sequence[Gap]) -> None:
    """Points above GRPO of each method, seed by seed."""
    for method, color in COLORS.items():
        own = [-100 * one.gap for one in cells if one.method == method and one.gap is not None]
        if own:
            spread(axes, own, LIGHT[color], label=method)
    axes.axvline(100 * BOUND, color=LIGHT["soft"], linewidth=1, linestyle="--")
    axes.set_yticks([])
    frame(axes, title, "points above GRPO, by seed")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=LIGHT["ink"], fontsize=8.5)


def _draw_passes(axes: Axes, passes: Mapping[int, Sequence[Bin]]) -> None:
    """Points above GRPO of one stage by the warm start's pass rate: seeds, their mean and its interval."""
    for place, (low, _) in enumerate(BINS):
        own = [-one.gap for one in six_passes.of_bin(passes, low)]
        if own:
            axes.scatter([place - 0.15] * len(own), own, color=LIGHT[COLORS["stage"]], s=20, linewidths=0)
            mean = mean_of(own)
            axes.errorbar([place + 0.15], [mean.value], [mean.half or 0.0], color=LIGHT["ink"], marker="o", linewidth=2)
    axes.axhline(0, color=LIGHT["soft"], linewidth=1, linestyle="--")
    axes.set_xticks(range(len(BINS)), [f"{low:g} to {high:g}" for low, high in BINS])
    axes.set_xlim(-0.5, len(BINS) - 0.5)
    frame(axes, "Small: points, by problem", "pass rate of the warm start")


def _draw_law(axes: Axes, law: Law, explored: Sequence[Gap], grids: dict[str, list[Gap]]) -> None:
    """Gap in percent of the warm start's errors, against nats; the curve is the fit, the band its interval."""
    nats = np.geomspace(*EDGE, 100)
    ends = np.array([law.interval(Gap("", each, 1.0, None)) for each in nats])
    axes.fill_between(nats, 100 * ends[:, 0], 100 * ends[:, 2], color=LIGHT["grey"], alpha=0.25, linewidth=0)
    axes.plot(nats, 100 * ends[:, 1], color=LIGHT["soft"], linewidth=1.5)
    groups = [("exploration", "grey", "o", explored)]
    for method, color in COLORS.items():
        groups.append((method, color, "o", [one for name in FITTED for one in grids[name] if one.method == method]))
    groups.append(("predicted: euclid", "red", "D", [one for name in PREDICTED for one in grids[name]]))
    for label, color, marker, cells in groups:
        own = [(one.nats, 100 * one.gap / one.errors) for one in cells if one.gap is not None]
        if own:
            xs, ys = [x for x, _ in own], [y for _, y in own]
            axes.scatter(xs, ys, s=26, color=LIGHT[color], marker=marker, linewidths=0, label=label)
    axes.axhline(0, color=LIGHT["soft"], linewidth=1, linestyle="--")
    nats_frame(axes, "Gap, % of the start's errors", "nats a response at a stage's end, mean over stages (log scale)")
    axes.legend(frameon=False, labelcolor=LIGHT["ink"], fontsize=8.5, loc="upper left")


if __name__ == "__main__":
    sys.exit(main())
