"""The study's pictures, drawn from docs/study/cells.csv and curves.csv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from run_scripts.study.findings import findings
from run_scripts.study.results import Results, Row, counted, mean_of, scientific
from run_scripts.svg import LIGHT, write_svg

WIDTH = 9.6
LOOKS: Mapping[str, tuple[str, str, str]] = {
    "grpo": ("ink", "-", "GRPO"),
    "strict": ("violet", "-", "GRPO's clip"),
    "none": ("orange", "-", "no veto"),
    "trigger": ("red", "-", "veto of T"),
    "suffix": ("grey", "-", "veto of S_κ"),
    "veto": ("green", "-", "mu-GRPO"),
    "response": ("blue", "-", "veto of S_seq"),
    "none_dual": ("orange", ":", "dual, no veto"),
    "veto_dual": ("green", ":", "dual, H_κ"),
    "grpo_long": ("ink", "--", "GRPO, 2,048 updates"),
    "four_long": ("green", "--", "4 of 512"),
    "two_long": ("blue", "--", "2 of 1,024"),
    "four": ("blue", "-.", "4 of 128"),
    "eight": ("violet", "-.", "8 of 64"),
    "grow_mild": ("grey", "--", "8 growing by 1.5"),
    "grow": ("orange", "--", "8 doubling"),
    "grow_decay": ("red", "-.", "8 doubling, decay"),
    "mild_decay": ("green", "-.", "8 growing by 1.5, decay"),
    "veto_1e-3": ("blue", ":", "below 10⁻³"),
    "veto_1e-2": ("violet", ":", "below 10⁻²"),
    "veto_0.1": ("red", ":", "below 0.1"),
    "veto_0.5": ("grey", ":", "below 0.5"),
}
"""Method -> colour, line, and a name that fits an axis."""
RATIO_TOP = 1.5
"""The highest E[ρ given A < 0] that is shown: one run's peak would hide all others."""
PANELS = (
    ("accuracy", "Accuracy on test problems", True),
    ("truncated", "Truncated test responses", True),
    ("clipped_fraction", "Clipped tokens", True),
    ("ratio_neg_mean", "E[ρ given A < 0]", False),
    ("trigger_tokens_1e-4", "Triggers among tokens with A < 0", True),
    ("vetoed_fraction", "Vetoed tokens", True),
)
"""Column of curves.csv, title, and whether it is a share."""


AXIS = ("grpo", "eight", "four", "veto")
"""The methods that show the price of staleness, by rising µ."""
ONE_STAGE = {"tuned": (), "hot": (), "regime": ("grpo",)}
"""Blocks that show what happens on one stage, and methods of other blocks that are drawn beside theirs."""
THRESHOLDS = ("veto_1e-3", "veto_1e-2", "veto_0.1", "veto_0.5")
"""The methods whose threshold is another than the study's."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the page."""

    draw: Callable[[Results], Figure]
    ready: Callable[[Results], bool]
    """Whether a finished cell is in it."""


def write_plots(results: Results, docs: Path) -> list[str]:
    """Draw every picture for which a cell has finished as NAME.svg; their names."""
    names = drawn(results)
    for name in names:
        write_svg(PICTURES[name].draw(results), docs / f"{name}.svg")
    return names


def drawn(results: Results) -> list[str]:
    """The names of the pictures for which a cell has finished."""
    return [name for name, picture in PICTURES.items() if picture.ready(results)]


def claims(results: Results) -> Figure:
    """The differences of each primary contrast that has any, seed by seed, their mean and interval, and the bound."""
    found = [(number, one) for number, one in enumerate(findings(results), 1) if one.values]
    figure, panels = _figure(2.7, 1, len(found), sharey=True)
    for axes, (number, one) in zip(panels, found, strict=True):
        claim, scale = one.contrast, 100 if one.contrast.column == "after" else 1
        values = [scale * value for value in one.values]
        spread(axes, values, LIGHT["blue"])
        axes.axvline(scale * claim.bound, color=LIGHT["soft"], linewidth=1, linestyle="--")
        sides = " - ".join(LOOKS[name][2] for name in (claim.left, claim.right) if name)
        _finish(
            axes,
            f"{number}. {one.verdict}{' by seed' * one.depends_on_seeds}",
            f"{sides}\n{'points' if scale == 100 else 'E[ρ, A < 0]'}",
        )
        axes.set_ylim(-0.7, results.grid.seeds - 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(4))
    panels[0].set_yticks(range(results.grid.seeds), [f"seed {seed}" for seed in range(results.grid.seeds)])
    return figure


def staleness(results: Results, methods: Sequence[str]) -> Figure:
    """Final accuracy over µ at tuned rates: thin lines are seeds, large dots the means of those with all methods."""
    figure, (axes,) = _figure(3.8, 1, 1)
    after = {results.grid.methods[name].mu: results.column("schedules", name, "after") for name in methods}
    for seed in results.grid.blocks["schedules"].seeds:
        own = [(mu, cells[seed]) for mu, cells in after.items() if seed in cells]
        if own:
            axes.plot(*zip(*own, strict=True), color=LIGHT["soft"], linewidth=0.8, alpha=0.6, marker="o", markersize=3)
    if whole := results.complete("schedules", methods):
        means = [mean_of([cells[seed] for seed in whole]).value for cells in after.values()]
        axes.plot(list(after), means, color=LIGHT["soft"], linewidth=1.5)
        colors = [LIGHT[LOOKS["grpo" if name == "grpo" else "veto"][0]] for name in methods]
        for mu, value, color in zip(after, means, colors, strict=True):
            axes.plot([mu], [value], color=color, marker="o", markersize=9)
    axes.set_xscale("log", base=2)
    shown = [results.grid.methods[name] for name in methods]
    labels = [f"{method.mu}\n{counted(results.grid.phases(method.name), 'stage')}" for method in shown]
    axes.set_xticks(list(after), labels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    _finish(axes, "Accuracy on test problems after all updates", "µ: updates on one stage's responses")
    return figure


def inside(results: Results, block: str, beside: Iterable[str] = (), panels: int = 6) -> Figure:
    """What happens inside a run (the paper's Figures 2 and 3): thin lines are seeds, thick ones their means.

    `beside`: methods of other blocks that are drawn as well, at the rates of this one.
    """
    cells = _cells(results, block, (*results.grid.blocks[block].methods, *beside))
    rows = -(-panels // 2)
    figure, axes_of = _figure(3.2 * rows if rows > 1 else 4.8, rows, min(panels, 2))
    for axes, (column, title, share) in zip(axes_of, PANELS[:panels], strict=True):
        for name, own in cells.items():
            _lines(axes, results, name, own, column)
        if share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        if share and column != "accuracy":
            axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1e-4))
        if column == "ratio_neg_mean":
            axes.set_ylim(top=min(axes.get_ylim()[1], RATIO_TOP))
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


def ends(results: Results) -> Figure:
    """Final accuracy minus that of the warm start, seed by seed, of the methods on one stage."""
    blocks = [results.grid.blocks[name] for name in ONE_STAGE if _any(results, name)]
    methods = [(*block.methods, *ONE_STAGE[block.name]) for block in blocks]
    figure, panels = _figure(3.8, 1, len(blocks), sharey=True, width_ratios=[len(names) + 1 for names in methods])
    for axes, block, names in zip(panels, blocks, methods, strict=True):
        for place, method in enumerate(names):
            gains = [row["after"] - row["before"] for row in results.of(block.name, method).values()]
            if gains:
                color = LIGHT[LOOKS[method][0]]
                axes.scatter([place] * len(gains), gains, color=color, s=22, alpha=0.5, linewidths=0)
                axes.scatter([place], [mean_of(gains).value], color=color, s=64)
        axes.axhline(0, color=LIGHT["soft"], linewidth=1, linestyle="--")
        axes.set_xlim(-0.7, len(names) - 0.3)
        axes.set_xticks(
            range(len(names)), [LOOKS[name][2] for name in names], rotation=45, ha="right", rotation_mode="anchor"
        )
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=""))
        _finish(axes, block.name if block.rate is None else f"{block.name}, rate {scientific(block.rate)}", "")
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
    by_update = dict(sorted(by_update.items()))
    means = [sum(values) / len(values) for values in by_update.values()]
    label = results.grid.methods[method].title
    axes.plot(list(by_update), means, color=color, linestyle=style, linewidth=2, label=label)


def _figure(height: float, rows: int, columns: int, **layout: Any) -> tuple[Figure, list[Axes]]:
    """An empty figure and its axes, row by row."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **layout).flat)


def _cells(results: Results, block: str, methods: Iterable[str]) -> dict[str, list[Row]]:
    """Method -> its finished cells in a block, of the methods that have any."""
    cells = {name: list(results.of(block, name).values()) for name in methods}
    return {name: rows for name, rows in cells.items() if rows}


def _any(results: Results, block: str) -> bool:
    return bool(_cells(results, block, results.grid.blocks[block].methods))


def _one_stage(results: Results) -> bool:
    return any(_any(results, name) for name in ONE_STAGE)


def _priced(results: Results) -> bool:
    """Whether a method between the ends of the µ axis has finished a cell."""
    return bool(_cells(results, "schedules", AXIS[1:-1]))


def _varied(results: Results) -> bool:
    """Whether a method with another threshold has finished a cell."""
    return bool(_cells(results, "thresholds", THRESHOLDS))


def _claimed(results: Results) -> bool:
    return any(one.values for one in findings(results))


def _finish(axes: Axes, title: str, x: str) -> None:
    """`frame` around at most six steps of the vertical axis."""
    axes.yaxis.set_major_locator(MaxNLocator(6))
    frame(axes, title, x)


def spread(axes: Axes, values: Sequence[float], color: str, label: str | None = None) -> None:
    """Values of the seeds, one above the other; a line is their mean, its band the 95 % interval."""
    axes.scatter(values, range(len(values)), color=color, s=28, linewidths=0, label=label)
    mean = mean_of(values)
    axes.axvline(mean.value, color=color, linewidth=2)
    if mean.half is not None:
        axes.axvspan(mean.value - mean.half, mean.value + mean.half, color=color, alpha=0.15, linewidth=0)


def frame(axes: Axes, title: str, x: str) -> None:
    """Heading, grid, spines, colours and the label of the horizontal axis."""
    axes.set_title(title, loc="left", color=LIGHT["ink"], fontsize=11, fontweight="bold")
    axes.set_facecolor(LIGHT["paper"])
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=LIGHT["soft"], length=0, labelsize=9.5)
    axes.set_xlabel(x, color=LIGHT["soft"], fontsize=9.5)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(LIGHT["line"])


PICTURES: Mapping[str, Picture] = {
    "claims": Picture(claims, _claimed),
    "staleness": Picture(partial(staleness, methods=AXIS), _priced),
    "inside-schedules": Picture(
        partial(inside, block="schedules", beside=("grpo", "veto"), panels=1), partial(_any, block="schedules")
    ),
    "inside-falling": Picture(
        partial(inside, block="falling", beside=("grpo",), panels=1), partial(_any, block="falling")
    ),
    "inside-regime": Picture(partial(inside, block="regime", beside=("grpo",)), partial(_any, block="regime")),
    "inside-hot": Picture(partial(inside, block="hot"), partial(_any, block="hot")),
    "inside-tuned": Picture(partial(inside, block="tuned"), partial(_any, block="tuned")),
    "ends": Picture(ends, _one_stage),
    "inside-long": Picture(partial(inside, block="long"), partial(_any, block="long")),
    "inside-thresholds": Picture(partial(inside, block="thresholds"), _varied),
}
"""Name -> picture, in the order of the page."""
