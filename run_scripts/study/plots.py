"""The study's pictures, drawn from docs/study/cells.csv and curves.csv."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from run_scripts.study.results import Results, Row, mean_of
from run_scripts.svg import LIGHT, write_svg

WIDTH = 9.6
LOOKS: Mapping[str, tuple[str, str]] = {
    "grpo": ("ink", "-"),
    "strict": ("violet", "-"),
    "none": ("orange", "-"),
    "trigger": ("red", "-"),
    "suffix": ("grey", "-"),
    "veto": ("green", "-"),
    "response": ("blue", "-"),
    "none_dual": ("orange", ":"),
    "veto_dual": ("green", ":"),
}
"""Method -> colour and line."""
PANELS = (
    ("accuracy", "Accuracy on test problems", True),
    ("truncated", "Test responses cut off", True),
    ("clipped_fraction", "Tokens that the clip holds back", True),
    ("ratio_neg_mean", "E[ρ given A < 0]", False),
    ("trigger_tokens_1e-4", "Triggers among tokens with A < 0", True),
    ("vetoed_fraction", "Tokens that the veto drops", True),
)
"""Column of curves.csv, title, and whether it is a share."""


def write_plots(results: Results, docs: Path) -> list[str]:
    """Draw every picture for which a cell has finished as NAME.svg; their names."""
    drawn = []
    for name, draw in PICTURES.items():
        if figure := draw(results):
            write_svg(figure, docs / f"{name}.svg")
            drawn.append(name)
    return drawn


def inside(results: Results, block: str, fresh: str = "") -> Figure | None:
    """What happens inside a stage (the paper's Figures 2 and 3): thin lines are seeds, thick ones their means.

    `fresh`: another block whose methods are drawn as well, for comparison.
    """
    methods = dict.fromkeys(results.grid.blocks[block].methods, block)
    methods |= dict.fromkeys(results.grid.blocks[fresh].methods, fresh) if fresh else {}
    cells = {name: list(results.of(own, name).values()) for name, own in methods.items()}
    cells = {name: rows for name, rows in cells.items() if rows}
    if not cells:
        return None
    figure = Figure(figsize=(WIDTH, 9.6), layout="constrained", facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    for axes, (column, title, share) in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
        for name, rows in cells.items():
            _lines(axes, results, name, rows, column)
        if share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
            axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1e-4))
        _finish(axes, title, "update")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        labelcolor=LIGHT["ink"],
        fontsize=9,
    )
    return figure


def ends(results: Results) -> Figure | None:
    """Final accuracy minus that of the warm start, seed by seed, in every block."""
    blocks = {name: block for name, block in results.grid.blocks.items() if _any(results, name)}
    if not blocks:
        return None
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained", facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    widths = [len(block.methods) + 1 for block in blocks.values()]
    panels = figure.subplots(1, len(blocks), squeeze=False, sharey=True, width_ratios=widths)[0]
    for axes, (name, block) in zip(panels, blocks.items(), strict=True):
        for place, method in enumerate(block.methods):
            gains = [row["after"] - row["before"] for row in results.of(name, method).values()]
            if gains:
                color = LIGHT[LOOKS[method][0]]
                axes.scatter([place] * len(gains), gains, color=color, s=22, alpha=0.5, linewidths=0)
                axes.scatter([place], [mean_of(gains).value], color=color, s=64)
        axes.axhline(0, color=LIGHT["soft"], linewidth=1, linestyle="--")
        axes.set_xlim(-0.7, len(block.methods) - 0.3)
        axes.set_xticks(range(len(block.methods)), [method.replace("_", "\n") for method in block.methods])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=""))
        _finish(axes, name if block.rate is None else f"{name}, rate {block.rate:g}", "")
        axes.tick_params(axis="x", labelsize=8)
    panels[0].set_ylabel("points gained over the warm start", color=LIGHT["soft"], fontsize=9.5)
    return figure


def _lines(axes: Axes, results: Results, method: str, rows: Sequence[Row], column: str) -> None:
    """One method's seeds and their mean."""
    color, style = LIGHT[LOOKS[method][0]], LOOKS[method][1]
    by_update: dict[int, list[float]] = {}
    for row in rows:
        points = [(point["update"], point[column]) for point in results.curve(row) if point[column] is not None]
        for update, value in points:
            by_update.setdefault(update, []).append(value)
        if len(rows) > 1 and points:
            axes.plot(*zip(*points, strict=True), color=color, linestyle=style, linewidth=0.8, alpha=0.4)
    means = [sum(values) / len(values) for values in by_update.values()]
    label = results.grid.methods[method].title
    axes.plot(list(by_update), means, color=color, linestyle=style, linewidth=2, label=label)


def _any(results: Results, block: str) -> bool:
    return any(results.of(block, method) for method in results.grid.blocks[block].methods)


def _finish(axes: Axes, title: str, x: str) -> None:
    """Heading, grid, spines, colours and the label of the horizontal axis."""
    axes.set_title(title, loc="left", color=LIGHT["ink"], fontsize=11, fontweight="bold")
    axes.set_facecolor(LIGHT["paper"])
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=LIGHT["soft"], length=0, labelsize=9.5)
    axes.set_xlabel(x, color=LIGHT["soft"], fontsize=9.5)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(LIGHT["line"])


PICTURES: Mapping[str, Callable[[Results], Figure | None]] = {
    "inside-regime": partial(inside, block="regime", fresh="fresh"),
    "inside-hot": partial(inside, block="hot"),
    "inside-tuned": partial(inside, block="tuned"),
    "ends": ends,
}
"""Name -> what draws it, or None while no cell has finished."""
