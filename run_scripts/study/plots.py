"""The study's pictures, each for light and for dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from mugrpo_megatron.observe.figure import DARK, LIGHT, Theme
from run_scripts.study.results import CPU, WALL, Results, mean_curve
from run_scripts.study.stats import Mean

WIDTH = 9.6


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
COLORS = {"grpo": "blue", "mu_grpo": "green", "relaxed": "orange", "strict": "violet"}
SCOPES = {
    "relaxed": ("none", "orange"),
    "scope_trigger": ("trigger", "red"),
    "mu_grpo": ("suffix_non_trigger", "green"),
    "scope_suffix": ("suffix", "blue"),
    "scope_response": ("response", "violet"),
}


def write_plots(results: Results, docs: Path) -> None:
    """Draw every picture that the results have data for, as NAME.svg and NAME-dark.svg."""
    for name, (draw, has_data) in PICTURES.items():
        if not has_data(results):
            continue
        for look_name, look in LOOKS.items():
            figure = draw(results, look)
            ending = "" if look_name == "light" else "-dark"
            with rc_context({"svg.hashsalt": "mugrpo", "svg.fonttype": "none"}):  # the same results, the same file
                path = docs / f"{name}{ending}.svg"
                figure.savefig(path, facecolor=look.theme.paper, metadata={"Date": None})


def accuracy_over_time(results: Results, look: Look) -> Figure:
    """Held-out accuracy over training wall-clock and over processor seconds (the paper's Figure 1)."""
    figure, axes = _figure(look, columns=2, height=4.0)
    for one, axis, label in zip(axes, (WALL, CPU), ("wall-clock, s", "processor time, s"), strict=True):
        for name, color in _known(results, COLORS):
            runs = [results.curve(row)["evals"] for row in results.timed(name)]
            runs = [run for run in runs if all(point[axis] is not None for point in run)]
            if runs:
                xs, means = mean_curve(runs, axis)
                _line(one, xs, means, look.series[color], results.grid.variants()[name].title)
        _percent(one)
        _finish(one, look, x=label)
    _legend(axes[1], look)
    axes[0].set_title("Held-out accuracy", loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")
    return figure


def clipping_dilemma(results: Results, look: Look) -> Figure:
    """Final accuracy by learning rate: what each clip does with large steps (the paper's Figure 2)."""
    figure, (by_rate, by_update) = _figure(look, columns=2, height=4.0)
    done = {(c.variant, c.rate): a for c, a in results.accuracies().items() if c.seed == 0}
    for name, color in _known(results, COLORS):
        found = [(r, done[name, r]) for r in results.grid.rates if (name, r) in done]
        by_rate.plot(
            [rate for rate, _ in found],
            [accuracy for _, accuracy in found],
            color=look.series[color],
            marker="o",
            linewidth=2,
            label=results.grid.variants()[name].title,
        )
        runs = [results.curve(row)["evals"] for row in results.tuned(name)]
        if runs:
            xs, means = mean_curve(runs, 0)
            _line(by_update, xs, means, look.series[color], results.grid.variants()[name].title)
    _rates(by_rate, results.grid.rates)
    _percent(by_rate)
    _percent(by_update)
    _finish(by_rate, look, x="learning rate")
    _finish(by_update, look, x="update, at the tuned rate")
    by_rate.set_title("Final accuracy, first seed", loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")
    by_update.set_title("Accuracy", loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")
    _legend(by_update, look)
    return figure


def scopes(results: Results, look: Look) -> Figure:
    """Accuracy by what the veto drops, over learning rates (the paper's Figure 3)."""
    figure, (by_rate, ratio) = _figure(look, columns=2, height=4.0)
    done = {(c.variant, c.rate): a for c, a in results.accuracies().items() if c.seed == 0}
    for name, (title, color) in SCOPES.items():
        found = [(r, done[name, r]) for r in results.grid.rates if (name, r) in done]
        if not found:
            continue
        xs, ys = zip(*found, strict=True)
        by_rate.plot(xs, ys, color=look.series[color], marker="o", linewidth=2, label=title)
        curve = results.curves.get(f"study/{name}/lr{results.grid.rates[-1]:g}-seed0", {}).get("updates")
        if curve:
            ratio.plot([v or None for v in curve["ratio_neg_max"]], color=look.series[color], linewidth=1.4)
    _rates(by_rate, results.grid.rates)
    _percent(by_rate)
    ratio.set_yscale("log")
    _finish(by_rate, look, x="learning rate")
    _finish(ratio, look, x=f"update, at rate {results.grid.rates[-1]:g}")
    by_rate.set_title("Final accuracy, first seed", loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")
    ratio.set_title("Largest negative ratio", loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")
    _legend(by_rate, look)
    return figure


def time_line(results: Results, look: Look) -> Figure:
    """What GRPO and mu-GRPO do when (the paper's Figure 4)."""
    figure, (axes,) = _figure(look, columns=1, height=2.3)
    names = ("mu_grpo", "grpo")
    for height, name in enumerate(names):
        phases = results.curve(results.tuned(name)[0])["phases"]
        for kind in ("optimize", "other", "generate"):  # saves lie inside optimize
            spans = [(start, end - start) for phase, start, end in phases if _kind(phase) == kind]
            axes.broken_barh(
                spans, (height - 0.32, 0.64), color=look.phases[kind], linewidth=0, label=None if height else kind
            )
    axes.set_yticks(range(len(names)), [results.grid.variants()[name].title for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(left=0)
    _finish(axes, look, x="wall-clock without start-up and evaluations, s")
    axes.grid(visible=False)
    figure.legend(loc="outside upper right", ncols=3, frameon=False, labelcolor=look.theme.ink, fontsize=9)
    return figure


def reward_by_stage(results: Results, look: Look) -> Figure:
    """Mean training reward of each stage's fresh responses (the paper's Figure 5)."""
    figure, (axes,) = _figure(look, columns=1, height=3.6)
    for name, color in _known(results, COLORS):
        for place, row in enumerate(results.tuned(name)):
            xs, ys = zip(*results.curve(row)["stages"], strict=True)
            title = results.grid.variants()[name].title
            axes.plot(
                xs,
                ys,
                color=look.series[color],
                linewidth=1.2 if place else 2,
                alpha=0.4 if place else 1,
                marker="o",
                markersize=3,
                label=None if place else title,
            )
    _percent(axes)
    _finish(axes, look, x="update at which the stage was sampled")
    axes.set_title("Reward of each stage's responses", loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")
    _legend(axes, look)
    return figure


def vetoed_fraction(results: Results, look: Look) -> Figure:
    """Share of tokens that the veto drops, over updates, at every rate (the paper's Figure 6)."""
    figure, (vetoed, ess) = _figure(look, columns=2, height=3.6)
    colors = [look.series[name] for name in ("blue", "green", "orange", "red", "violet")]
    for rate, color in zip(results.grid.rates, colors, strict=False):
        curve = results.curves.get(f"study/mu_grpo/lr{rate:g}-seed0", {}).get("updates")
        if curve:
            vetoed.plot(curve["vetoed_fraction"], color=color, linewidth=1.6, label=f"rate {rate:g}")
            ess.plot(curve["ess"], color=color, linewidth=1.6)
    for one, title in ((vetoed, "Vetoed tokens"), (ess, "Effective sample size")):
        _percent(one)
        _finish(one, look, x="update")
        one.set_ylim(bottom=0)
        one.set_title(title, loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")
    _legend(vetoed, look)
    return figure


def kappa(results: Results, look: Look) -> Figure:
    """Accuracy against the veto's threshold, tuned and at every rate."""
    figure, (axes,) = _figure(look, columns=1, height=3.6)
    thresholds = {
        variant.name: 0.5 if variant.name == "mu_grpo" else variant.objective["kappa"]
        for variant in results.grid.variants().values()
        if variant.name == "mu_grpo" or variant.name.startswith("kappa_")
    }
    done = {(c.variant, c.rate): a for c, a in results.accuracies().items() if c.seed == 0}
    colors = [look.series[name] for name in ("blue", "green", "orange", "red", "violet")]
    for rate, color in zip(results.grid.rates, colors, strict=False):
        found = sorted((value, done[name, rate]) for name, value in thresholds.items() if (name, rate) in done)
        if found:
            xs, ys = zip(*found, strict=True)
            axes.plot(xs, ys, color=color, marker="o", linewidth=2, label=f"rate {rate:g}, first seed")
    _percent(axes)
    _finish(axes, look, x="κ")
    axes.set_title("Final accuracy", loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")
    _legend(axes, look)
    return figure


def staleness(results: Results, look: Look) -> Figure:
    """Accuracy at the tuned rate against µ."""
    figure, (axes,) = _figure(look, columns=1, height=3.6)
    variants = results.grid.variants()
    lines = {
        "mu-GRPO": ("green", [n for n in variants if n.startswith("mu_")]),
        "strict clip": ("violet", ["grpo", *(n for n in variants if n.startswith("strict"))]),
    }
    for title, (color, names) in lines.items():
        found = sorted((variants[n].mu, m.value, m.half or 0.0) for n in names if (m := results.mean(n)))
        if found:
            xs, ys, halves = zip(*found, strict=True)
            axes.errorbar(
                xs, ys, yerr=halves, color=look.series[color], marker="o", linewidth=2, capsize=3, label=title
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    _percent(axes)
    _finish(axes, look, x="µ, updates per stage")
    axes.set_title("Final accuracy at the tuned rate", loc="left", color=look.theme.ink, fontsize=12, fontweight="bold")
    _legend(axes, look)
    return figure


def _known(results: Results, colors: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, color) for name, color in colors.items() if name in results.grid.variants()]


def _figure(look: Look, *, columns: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=look.theme.paper)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _line(axes: Axes, xs: Sequence[float], means: Sequence[Mean], color: str, label: str) -> None:
    values = [mean.value for mean in means]
    halves = [mean.half or 0.0 for mean in means]
    low, high = ([v + sign * h for v, h in zip(values, halves, strict=True)] for sign in (-1, 1))
    axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(xs, values, color=color, linewidth=2, marker="o", markersize=4, label=label)


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(6))


def _rates(axes: Axes, rates: Iterable[float]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(rates)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _finish(axes: Axes, look: Look, *, x: str) -> None:
    theme = look.theme
    axes.set_facecolor(theme.paper)
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=theme.soft, length=0, labelsize=9.5)
    axes.set_xlabel(x, color=theme.soft, fontsize=9.5)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(theme.line)


def _legend(axes: Axes, look: Look) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(facecolor=look.theme.paper, edgecolor="none", labelcolor=look.theme.ink, fontsize=9)


def _kind(phase: str) -> str:
    return phase if phase in ("generate", "optimize") else "other"


def _any_of(*names: str) -> Callable[[Results], bool]:
    return lambda results: any(row["variant"] in names for row in results.of_kind("study"))


def _all_of(*names: str) -> Callable[[Results], bool]:
    return lambda results: all(results.tuned(name) for name in names)


PICTURES: dict[str, tuple[Callable[[Results, Look], Figure], Callable[[Results], bool]]] = {
    "accuracy-over-time": (accuracy_over_time, _all_of("grpo", "mu_grpo")),
    "clipping-dilemma": (clipping_dilemma, _any_of("grpo")),
    "scopes": (scopes, _any_of("scope_trigger")),
    "time-line": (time_line, _all_of("grpo", "mu_grpo")),
    "reward-by-stage": (reward_by_stage, _all_of("grpo", "mu_grpo")),
    "vetoed-fraction": (vetoed_fraction, _any_of("mu_grpo")),
    "kappa": (kappa, _any_of("kappa_010", "kappa_025", "kappa_075", "kappa_090")),
    "staleness": (staleness, _any_of("mu_008", "mu_064")),
}
"""Name -> how it is drawn, and whether there is anything to draw."""
