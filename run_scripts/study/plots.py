"""The study's pictures, each for light and for dark pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from mugrpo_megatron.recipe import load_recipe
from run_scripts.study import drawing
from run_scripts.study.drawing import LOOKS, Look
from run_scripts.study.results import CPU, UPDATE, WALL, Results, mean_curve
from run_scripts.study.stats import mean_of

SHARED = Path(__file__).with_name("base.toml")
RATE_COLORS = ("blue", "green", "orange", "red", "violet")
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
    figure, axes = drawing.figure(look, columns=2, height=4.0)
    for one, axis, label in zip(axes, (WALL, CPU), ("wall-clock, s", "processor time, s"), strict=True):
        for name, color in _known(results, COLORS):
            runs = [results.curve(row)["evals"] for row in results.timed(name)]
            runs = [run for run in runs if all(point[axis] is not None for point in run)]
            if runs:
                xs, means = mean_curve(runs, axis)
                drawing.line(one, xs, means, look.series[color], results.grid.variants()[name].title)
        drawing.percent(one)
        drawing.finish(one, look, x=label)
    drawing.legend(axes[1], look)
    drawing.title(axes[0], look, "Held-out accuracy")
    return figure


def clipping_dilemma(results: Results, look: Look) -> Figure:
    """Final accuracy by learning rate, fresh against stale: what each clip does with large steps (Figure 2)."""
    figure, (few, one) = drawing.figure(look, columns=2, height=4.0)
    for axes, colors in ((few, COLORS), (one, {"grpo": "blue"} | ONE_STAGE)):
        for name, color in _known(results, colors):
            rates = [rate for rate in results.grid.all_rates() if results.at(name, rate)]
            means = [mean_of(list(results.at(name, rate).values())) for rate in rates]
            if rates:
                drawing.line(axes, rates, means, look.series[color], results.grid.variants()[name].title)
        drawing.rates(axes, results.grid.all_rates())
        drawing.percent(axes)
        drawing.finish(axes, look, x="learning rate, 10⁻⁴")
        drawing.legend(axes, look)
    drawing.title(few, look, "Final accuracy, µ=32")
    drawing.title(one, look, "Final accuracy, µ=128")
    return figure


def scopes(results: Results, look: Look) -> Figure:
    """Accuracy by what the veto drops, seed by seed, and how far negative ratios run away (the paper's Figure 3)."""
    figure, (ends, ratio) = drawing.figure(look, columns=2, height=4.0)
    shared = [set(results.at_rates(name)) for name in SCOPES if results.at_rates(name)]
    rate = max(set.intersection(*shared), default=0.0)
    for place, (name, (_, color)) in enumerate(SCOPES.items()):
        drawing.seeds(ends, place, list(results.at(name, rate).values()), look.series[color])
        curve = results.curves.get(f"study/{name}/lr{rate:g}-seed0", {}).get("updates")
        if curve:
            smooth = drawing.windows([value or None for value in curve["ratio_neg_max"]])
            ratio.plot(*smooth, color=look.series[color], linewidth=1.6)
    before = mean_of([row["accuracy_before"] for row in results.rows]).value
    ends.axhline(before, color=look.theme.soft, linewidth=1, linestyle="--")
    corner: dict[str, Any] = {"transform": ends.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    ends.text(0.99, before, "warm start", color=look.theme.soft, fontsize=9, **corner)
    drawing.percent(ends)
    ratio.set_yscale("log")
    drawing.finish(ends, look, x=f"dropped, at rate {rate:g}")
    ends.set_xticks(range(len(SCOPES)), [title.replace("_", "\n") for title, _ in SCOPES.values()])
    drawing.finish(ratio, look, x=f"update, means of {drawing.WINDOW}, at rate {rate:g}")
    drawing.title(ends, look, "Final accuracy, seed by seed")
    drawing.title(ratio, look, "Largest negative ratio")
    return figure


def time_line(results: Results, look: Look) -> Figure:
    """What GRPO and mu-GRPO do when (the paper's Figure 4)."""
    figure, (axes,) = drawing.figure(look, columns=1, height=2.3)
    names = ("mu_grpo", "grpo")
    for height, name in enumerate(names):
        phases = results.curve(results.timed(name)[0])["phases"]
        for kind in ("optimize", "other", "generate"):  # saves lie inside optimize
            spans = [(start, end - start) for phase, start, end in phases if _kind(phase) == kind]
            axes.broken_barh(
                spans, (height - 0.32, 0.64), color=look.phases[kind], linewidth=0, label=None if height else kind
            )
    axes.set_yticks(range(len(names)), [results.grid.variants()[name].title for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(left=0)
    drawing.finish(axes, look, x="wall-clock without start-up and evaluations, s")
    axes.grid(visible=False)
    figure.legend(loc="outside upper right", ncols=3, frameon=False, labelcolor=look.theme.ink, fontsize=9)
    return figure


def reward_by_stage(results: Results, look: Look) -> Figure:
    """Mean training reward of each stage's fresh responses (the paper's Figure 5)."""
    figure, (axes,) = drawing.figure(look, columns=1, height=3.6)
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
    drawing.percent(axes)
    drawing.finish(axes, look, x="update at which the stage was sampled")
    drawing.title(axes, look, "Reward of each stage's responses")
    drawing.legend(axes, look)
    return figure


def vetoed_fraction(results: Results, look: Look) -> Figure:
    """Share of tokens that the veto drops and effective sample size, over updates (the paper's Figure 6)."""
    figure, (vetoed, ess) = drawing.figure(look, columns=2, height=3.6)
    for name, style in (("mu_grpo", "--"), ("mu_128", "-")):
        for rate, color in ((results.grid.rates[0], "blue"), (results.grid.rates[-1], "orange")):
            curve = results.curves.get(f"study/{name}/lr{rate:g}-seed0", {}).get("updates")
            if curve:
                label = f"µ={results.grid.variants()[name].mu}, rate {rate:g}"
                for axes, column in ((vetoed, "vetoed_fraction"), (ess, "ess")):
                    smooth = drawing.windows(curve[column])
                    axes.plot(*smooth, color=look.series[color], linestyle=style, linewidth=1.8, label=label)
    for one, title in ((vetoed, "Vetoed tokens"), (ess, "Effective sample size")):
        drawing.percent(one)
        drawing.finish(one, look, x=f"update, means of {drawing.WINDOW}")
        one.set_ylim(bottom=0)
        drawing.title(one, look, title)
    drawing.legend(ess, look)
    return figure


def kappa(results: Results, look: Look) -> Figure:
    """Accuracy against the veto's threshold, seed by seed; the threshold of `mu_128` is the one that cells share."""
    figure, (axes,) = drawing.figure(look, columns=1, height=3.6)
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
            axes.plot([k for k, _ in found], means, color=look.series[color], linewidth=2, label=f"rate {rate:g}")
            for value, seeds in found:
                drawing.seeds(axes, value, list(seeds.values()), look.series[color])
    drawing.percent(axes)
    drawing.finish(axes, look, x="κ")
    drawing.title(axes, look, "Final accuracy, seed by seed")
    drawing.legend(axes, look)
    return figure


def staleness(results: Results, look: Look) -> Figure:
    """Accuracy at the tuned rate against µ."""
    figure, (axes,) = drawing.figure(look, columns=1, height=3.6)
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
            axes.errorbar(
                xs, ys, yerr=halves, color=look.series[color], marker="o", linewidth=2, capsize=3, label=title
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    drawing.percent(axes)
    drawing.finish(axes, look, x="µ, updates per stage")
    drawing.title(axes, look, "Final accuracy at the tuned rate")
    drawing.legend(axes, look)
    return figure


def inside(results: Results, look: Look) -> Figure:
    """Accuracy while one stage's responses grow old, and that of GRPO, whose responses do not."""
    figure, (axes,) = drawing.figure(look, columns=1, height=3.8)
    titles = results.grid.variants()
    fresh = [results.curve(row)["evals"] for row in results.tuned("grpo")]
    drawing.line(axes, *mean_curve(fresh, UPDATE), look.series["blue"], titles["grpo"].title)
    for name, color in ONE_STAGE.items():
        if runs := results.inside_of(name):
            drawing.line(axes, *mean_curve(runs, UPDATE), look.series[color], titles[name].title)
    drawing.percent(axes)
    drawing.finish(axes, look, x="updates; with µ=128 the age of the responses too")
    drawing.title(axes, look, "Held-out accuracy inside a stage")
    drawing.legend(axes, look)
    return figure


def _known(results: Results, colors: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, color) for name, color in colors.items() if name in results.grid.variants()]


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
    "staleness": (staleness, _any_of("mu_064", "mu_128")),
    "inside": (inside, lambda results: bool(results.inside)),
}
"""Name -> how it is drawn, and whether there is anything to draw."""
