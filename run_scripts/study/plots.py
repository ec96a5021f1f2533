"""The study's pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from mugrpo_megatron.recipe import load_recipe
from run_scripts.study.results import CLOCK, CPU, UPDATE, WALL, Mean, Results, mean_curve, mean_of
from run_scripts.svg import LIGHT, write_svg

WIDTH = 9.6
WINDOW = 4
"""Updates averaged in a point of a noisy curve."""
SHARED = Path(__file__).with_name("base.toml")
RATE_COLORS = ("blue", "green", "orange", "red", "violet")
PHASE_COLORS = {"optimize": LIGHT["green"], "other": LIGHT["grey"], "generate": LIGHT["blue"]}
"""In the order in which they are drawn."""
COLORS = {"grpo": "blue", "mu_grpo": "green", "relaxed": "orange", "strict": "violet"}
ONE_STAGE = {"mu_128": "green", "relaxed_128": "orange", "strict_128": "violet"}
SCOPES = {
    "relaxed_128": ("none", "orange"),
    "scope_trigger": ("trigger", "red"),
    "mu_128": ("suffix_non_trigger", "green"),
    "scope_suffix": ("suffix", "blue"),
    "scope_response": ("response", "violet"),
}


def write_plots(results: Results, docs: Path) -> None:
    """Draw every picture as NAME.svg."""
    for name, draw in PICTURES.items():
        write_svg(draw(results), docs / f"{name}.svg")


def accuracy_over_time(results: Results) -> Figure:
    """Held-out accuracy over training wall-clock and over processor seconds (the paper's Figure 1)."""
    figure, axes = _figure(columns=2, height=4.0)
    for one, axis, label in zip(axes, (WALL, CPU), ("wall-clock, s", "processor time, s"), strict=True):
        for name, color in COLORS.items():
            runs = [results.curve(row)["evals"] for row in results.tuned(name, CLOCK)]
            runs = [run for run in runs if all(point[axis] is not None for point in run)]
            if runs:
                xs, means = mean_curve(runs, axis)
                _line(one, xs, means, LIGHT[color], results.grid.variants()[name].title)
        _percent(one)
        _finish(one, x=label)
    _legend(axes[1])
    _title(axes[0], "Held-out accuracy")
    return figure


def clipping_dilemma(results: Results) -> Figure:
    """Final accuracy by learning rate, fresh and stale, for each clip (the paper's Figure 2)."""
    figure, (few, one) = _figure(columns=2, height=4.0)
    for axes, colors in ((few, COLORS), (one, {"grpo": "blue"} | ONE_STAGE)):
        for name, color in colors.items():
            rates = [rate for rate in results.grid.all_rates() if results.at(name, rate)]
            means = [mean_of(list(results.at(name, rate).values())) for rate in rates]
            if rates:
                _line(axes, rates, means, LIGHT[color], results.grid.variants()[name].title)
        _rates(axes, results.grid.all_rates())
        _percent(axes)
        _finish(axes, x="learning rate, 10⁻⁴")
        _legend(axes)
    _title(few, "Final accuracy, µ=32")
    _title(one, "Final accuracy, µ=128")
    return figure


def scopes(results: Results) -> Figure:
    """Accuracy by scope of the veto, seed by seed, and the largest ratio of negative tokens (the paper's Figure 3)."""
    figure, (ends, ratio) = _figure(columns=2, height=4.0)
    shared = [set(results.at_rates(name)) for name in SCOPES if results.at_rates(name)]
    rate = max(set.intersection(*shared), default=0.0)
    for place, (name, (_, color)) in enumerate(SCOPES.items()):
        _seeds(ends, place, list(results.at(name, rate).values()), LIGHT[color])
        curve = results.curves.get(f"study/{name}/lr{rate:g}-seed0", {}).get("updates")
        if curve:
            smooth = _windows([value or None for value in curve["ratio_neg_max"]])
            ratio.plot(*smooth, color=LIGHT[color], linewidth=1.6)
    before = mean_of([row["accuracy_before"] for row in results.rows]).value
    ends.axhline(before, color=LIGHT["soft"], linewidth=1, linestyle="--")
    corner: dict[str, Any] = {"transform": ends.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    ends.text(0.99, before, "warm start", color=LIGHT["soft"], fontsize=9, **corner)
    _percent(ends)
    ratio.set_yscale("log")
    _finish(ends, x=f"dropped, at rate {rate:g}")
    ends.set_xticks(range(len(SCOPES)), [title.replace("_", "\n") for title, _ in SCOPES.values()])
    _finish(ratio, x=f"update, means of {WINDOW}, at rate {rate:g}")
    _title(ends, "Final accuracy, seed by seed")
    _title(ratio, "Largest negative ratio")
    return figure


def time_line(results: Results) -> Figure:
    """Phases of GRPO and mu-GRPO over time (the paper's Figure 4)."""
    figure, (axes,) = _figure(columns=1, height=2.3)
    names = ("mu_grpo", "grpo")
    for height, name in enumerate(names):
        phases = results.curve(results.tuned(name, CLOCK)[0])["phases"]
        for kind, color in PHASE_COLORS.items():  # saves are inside optimize
            spans = [(start, end - start) for phase, start, end in phases if _kind(phase) == kind]
            axes.broken_barh(spans, (height - 0.32, 0.64), color=color, linewidth=0, label=None if height else kind)
    axes.set_yticks(range(len(names)), [results.grid.variants()[name].title for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(left=0)
    _finish(axes, x="wall-clock without start-up and evaluations, s")
    axes.grid(visible=False)
    figure.legend(loc="outside upper right", ncols=3, frameon=False, labelcolor=LIGHT["ink"], fontsize=9)
    return figure


def reward_by_stage(results: Results) -> Figure:
    """Mean training reward of each stage's fresh responses (the paper's Figure 5)."""
    figure, (axes,) = _figure(columns=1, height=3.6)
    for name, color in COLORS.items():
        for place, row in enumerate(results.tuned(name)):
            xs, ys = zip(*results.curve(row)["stages"], strict=True)
            title = results.grid.variants()[name].title
            look = {"linewidth": 1.2, "alpha": 0.4} if place else {"linewidth": 2, "alpha": 1}
            label = None if place else title
            axes.plot(xs, ys, color=LIGHT[color], marker="o", markersize=3, label=label, **look)
    _percent(axes)
    _finish(axes, x="update at which the stage was sampled")
    _title(axes, "Reward of each stage's responses")
    _legend(axes)
    return figure


def vetoed_fraction(results: Results) -> Figure:
    """Share of tokens that the veto drops and effective sample size, over updates (the paper's Figure 6)."""
    figure, (vetoed, ess) = _figure(columns=2, height=3.6)
    for name, style in (("mu_grpo", "--"), ("mu_128", "-")):
        for rate, color in ((results.grid.rates[0], "blue"), (results.grid.rates[-1], "orange")):
            curve = results.curves.get(f"study/{name}/lr{rate:g}-seed0", {}).get("updates")
            if curve:
                label = f"µ={results.grid.variants()[name].mu}, rate {rate:g}"
                for axes, column in ((vetoed, "vetoed_fraction"), (ess, "ess")):
                    smooth = _windows(curve[column])
                    axes.plot(*smooth, color=LIGHT[color], linestyle=style, linewidth=1.8, label=label)
    for one, title in ((vetoed, "Vetoed tokens"), (ess, "Effective sample size")):
        _percent(one)
        _finish(one, x=f"update, means of {WINDOW}")
        one.set_ylim(bottom=0)
        _title(one, title)
    _legend(ess)
    return figure


def kappa(results: Results) -> Figure:
    """Accuracy against the veto's threshold, seed by seed; `mu_128` has the threshold of base.toml."""
    figure, (axes,) = _figure(columns=1, height=3.6)
    shared = load_recipe(SHARED).objective.trigger_ratio
    thresholds = {
        variant.name: variant.objective.get("trigger_ratio", shared)
        for variant in results.grid.variants().values()
        if variant.name == "mu_128" or variant.name.startswith("kappa_")
    }
    for rate, color in zip(results.grid.all_rates(), RATE_COLORS, strict=False):
        found = sorted((value, results.at(name, rate)) for name, value in thresholds.items() if results.at(name, rate))
        if len(found) > 1:
            means = [mean_of(list(seeds.values())).value for _, seeds in found]
            axes.plot([k for k, _ in found], means, color=LIGHT[color], linewidth=2, label=f"rate {rate:g}")
            for value, seeds in found:
                _seeds(axes, value, list(seeds.values()), LIGHT[color])
    _percent(axes)
    _finish(axes, x="κ")
    _title(axes, "Final accuracy, seed by seed")
    _legend(axes)
    return figure


def staleness(results: Results) -> Figure:
    """Accuracy at the tuned rate against µ."""
    figure, (axes,) = _figure(columns=1, height=3.6)
    variants = results.grid.variants()
    lines = {
        "mu-GRPO": ("green", [n for n in variants if n.startswith("mu_")]),
        "relaxed clip, no veto": ("orange", [n for n in variants if n.startswith("relaxed")]),
        "strict clip": ("violet", ["grpo", *(n for n in variants if n.startswith("strict"))]),
    }
    for title, (color, names) in lines.items():
        found = sorted((variants[n].mu, m.value, m.half or 0.0) for n in names if (m := results.mean(n)))
        if found:
            xs, ys, halves = zip(*found, strict=True)
            axes.errorbar(xs, ys, yerr=halves, color=LIGHT[color], marker="o", linewidth=2, capsize=3, label=title)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    _percent(axes)
    _finish(axes, x="µ, updates per stage")
    _title(axes, "Final accuracy at the tuned rate")
    _legend(axes)
    return figure


def inside(results: Results) -> Figure:
    """Accuracy inside a stage, over the age of its responses, next to GRPO on fresh responses."""
    figure, (axes,) = _figure(columns=1, height=3.8)
    titles = results.grid.variants()
    fresh = [results.curve(row)["evals"] for row in results.tuned("grpo")]
    _line(axes, *mean_curve(fresh, UPDATE), LIGHT["blue"], titles["grpo"].title)
    for name, color in ONE_STAGE.items():
        if runs := results.inside_of(name):
            _line(axes, *mean_curve(runs, UPDATE), LIGHT[color], titles[name].title)
    _percent(axes)
    _finish(axes, x="updates; with µ=128 the age of the responses too")
    _title(axes, "Held-out accuracy inside a stage")
    _legend(axes)
    return figure


def _kind(phase: str) -> str:
    return phase if phase in ("generate", "optimize") else "other"


def _figure(*, columns: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure and its axes side by side; `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _line(axes: Axes, xs: Sequence[float], means: Sequence[Mean], color: str, label: str) -> None:
    """Means over seeds as a line in a band of their intervals."""
    values = [mean.value for mean in means]
    halves = [mean.half or 0.0 for mean in means]
    low, high = ([v + sign * h for v, h in zip(values, halves, strict=True)] for sign in (-1, 1))
    axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(xs, values, color=color, linewidth=2, marker="o", markersize=4, label=label)


def _seeds(axes: Axes, x: float, values: Sequence[float], color: str) -> None:
    """A dot for every seed, and a larger one for their mean."""
    axes.scatter([x] * len(values), values, color=color, s=22, alpha=0.45, linewidths=0)
    if values:
        axes.scatter([x], [mean_of(values).value], color=color, s=64)


def _windows(values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Centres and means of windows of `WINDOW` updates, without those that have no value."""
    blocks = [(i, [v for v in values[i : i + WINDOW] if v is not None]) for i in range(0, len(values), WINDOW)]
    return [i + WINDOW / 2 for i, block in blocks if block], [sum(block) / len(block) for _, block in blocks if block]


def _title(axes: Axes, text: str) -> None:
    """A heading at the left."""
    axes.set_title(text, loc="left", color=LIGHT["ink"], fontsize=12, fontweight="bold")


def _percent(axes: Axes) -> None:
    """Fractions as per cent on the vertical axis."""
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(6))


def _rates(axes: Axes, places: Iterable[float]) -> None:
    """Learning rates on a logarithmic axis in units of 10⁻⁴, a tick at each of `places`."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{1e4 * x:g}"))


def _finish(axes: Axes, *, x: str) -> None:
    """Grid, spines, colours and the label of the horizontal axis."""
    axes.set_facecolor(LIGHT["paper"])
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=LIGHT["soft"], length=0, labelsize=9.5)
    axes.set_xlabel(x, color=LIGHT["soft"], fontsize=9.5)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(LIGHT["line"])


def _legend(axes: Axes) -> None:
    """A legend, if anything is labelled."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(facecolor=LIGHT["paper"], edgecolor="none", labelcolor=LIGHT["ink"], fontsize=9)


PICTURES: Mapping[str, Callable[[Results], Figure]] = {
    "accuracy-over-time": accuracy_over_time,
    "clipping-dilemma": clipping_dilemma,
    "scopes": scopes,
    "time-line": time_line,
    "reward-by-stage": reward_by_stage,
    "vetoed-fraction": vetoed_fraction,
    "kappa": kappa,
    "staleness": staleness,
    "inside": inside,
}
