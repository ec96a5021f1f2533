"""The paper's Figures 2 and 3 (arXiv 2605.17570, the project page's plots) for one run: a line of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mugrpo_megatron.observe.curves import Chart, Series, column, over_updates
from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.paper import mask_name
from mugrpo_megatron.observe.rundata import RunData

SET_COLORS = ("orange", "teal", "violet", "yellow", "magenta", "red", "grey")


def paper_charts(run: RunData, buckets: Sequence[Sequence[Row]]) -> Iterable[Chart]:
    """Average accuracy (both figures), token clipping rate (Figure 2) and E[ρ_t | A_t < 0] (Figure 3)."""
    yield _accuracy(run)
    yield Chart(
        "paper_clipping",
        "Figure 2: token clipping rate",
        "Share of response tokens whose gradient the clip takes away, as a fraction like the paper's axis.",
        [over_updates(buckets, "token clipping rate", "blue", "clipped_fraction", anew=True)],
        zero=True,
    )
    yield Chart(
        "paper_ratio",
        "Figure 3: E[ρ_t | A_t < 0]",
        "Mean importance ratio of negative tokens, vetoed ones included. In the paper it stays at 1 in stable runs and "
        "falls in those that collapse.",
        [over_updates(buckets, "E[ρ_t | A_t < 0]", "violet", "ratio_neg_mean", anew=True)],
        zero=True,
        rule=1.0,
        rule_label="on policy",
    )


def paper_remark(run: RunData) -> str:
    """Which line of the paper's legends the run would be."""
    objective = run.recipe.get("objective", {})
    clip = ", ".join(f"{objective[key]:g}" if key in objective else "?" for key in ("clip_low", "clip_high"))
    stage = run.recipe.get("schedule", {}).get("updates_per_stage", "?")
    return f"this run's line: {objective.get('name', '?')}, µ = {stage}, clip [{clip}], {mask_name(objective)}"


def _accuracy(run: RunData) -> Chart:
    names = list(dict.fromkeys(name for row in run.evals for name in row if name.startswith(("accuracy/", "reward/"))))
    measure = names[0].partition("/")[0] if names else "accuracy"
    sets = [name for name in names if name != f"{measure}/mean"]
    mean = Series(
        "mean of the sets" if len(sets) > 1 else measure,
        "blue",
        "eval",
        column(run.evals, f"{measure}/mean"),
        draw="dots",
        low=column(run.evals, "low/mean"),
        high=column(run.evals, "high/mean"),
        bold=True,
    )
    each = [
        Series(name.partition("/")[2], SET_COLORS[place % len(SET_COLORS)], "eval", column(run.evals, name))
        for place, name in enumerate(sets)
    ]
    return Chart(
        "paper_accuracy",
        f"Figures 2 and 3: average {measure}",
        "Unweighted mean of the held-out sets with its 95 % interval. Along wall-clock it is the paper's Figure 1. "
        "Evaluations inside a stage come with eval.every_updates.",
        [*(each if len(sets) > 1 else ()), mean],
        format="percent" if measure == "accuracy" else "number",
        wide=True,
    )
