"""One run as a line of the paper's Figures 1 to 6 (arXiv 2605.17570; 1 to 4 are on the project page)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.paper import mask_name
from mugrpo_megatron.recipe.scoring import MEAN
from mugrpo_megatron.report.curves import Chart, Series, column, over_updates, rounded
from mugrpo_megatron.report.evaluations import interval_in, measure_in, sets_in
from mugrpo_megatron.report.rundata import RunData

SET_COLORS = ("teal", "violet", "magenta", "yellow", "red", "grey", "ramp-2", "ramp-5")
"""Colours of held-out sets; their mean is blue, the training reward orange."""


def paper_charts(run: RunData, buckets: Sequence[Sequence[Row]]) -> Iterable[Chart]:
    """Average accuracy (1 to 3), token clipping rate (2), E[ρ_t | A_t < 0] (3), reward (5) and vetoed fraction (6)."""
    yield _accuracy(run)
    yield Chart(
        "paper_clipping",
        "Figure 2: token clipping rate",
        "Share of response tokens whose gradient the clip removes; a fraction, as on the paper's axis.",
        [over_updates(buckets, "token clipping rate", "blue", "clipped_fraction", restarts=True)],
        zero=True,
    )
    yield Chart(
        "paper_ratio",
        "Figure 3: E[ρ_t | A_t < 0]",
        "Mean importance ratio of tokens with negative advantage, vetoed ones included. In the paper it stays at 1 in "
        "stable runs and falls in runs that collapse.",
        [over_updates(buckets, "E[ρ_t | A_t < 0]", "violet", "ratio_neg_mean", restarts=True)],
        zero=True,
        rule=1.0,
        rule_label="on policy",
    )
    yield Chart(
        "paper_reward",
        "Figure 5: average reward",
        "Mean reward of the responses that each update trains on; they were sampled when their stage began.",
        [over_updates(buckets, "average reward", "orange", "reward_mean", smooth=True, restarts=True)],
    )
    yield Chart(
        "paper_vetoed",
        "Figure 6: vetoed fraction",
        "Share of response tokens that the veto removes; a fraction, as on the paper's axis.",
        [over_updates(buckets, "vetoed fraction", "red", "vetoed_fraction", restarts=True)],
        zero=True,
    )


def paper_remark(run: RunData) -> str:
    """The run's settings in the terms of the paper's legends."""
    objective = run.recipe.get("objective", {})
    clip = ", ".join(f"{objective[key]:g}" if key in objective else "?" for key in ("clip_low", "clip_high"))
    schedule = run.recipe.get("schedule", {})
    passes = f" x {schedule['passes']} passes" if schedule.get("passes", 1) != 1 else ""
    stage = f"{schedule.get('updates_per_stage', '?')}{passes}"
    return f"this run's line: {objective.get('name', '?')}, µ = {stage}, clip [{clip}], {mask_name(objective)}"


def paper_notes(run: RunData, drawn: Container[str]) -> list[str]:
    """Where Figure 4 is, and why a figure is missing or has less than the paper's."""
    notes = ["Figure 4 is the time line at the end of this page; the paper's is a sketch of it."]
    if "paper_accuracy" not in drawn:
        notes.append("Figures 1 to 3 have no accuracy: the run has not been evaluated yet.")
    elif len(run.evals) < 2:
        notes.append("Figures 1 to 3 have one point: the run has been evaluated once.")
    elif not any(row.get("age") for row in run.evals):
        notes.append(
            "The paper evaluates inside a stage too; eval.every_updates does, and this run has evaluations at its "
            "stages' ends only."
        )
    missing = {
        "paper_clipping": "Figure 2 has no clipping rate: no update has been taken yet.",
        "paper_ratio": "Figure 3 has no ratio: no update had a response with negative advantage.",
        "paper_reward": "Figure 5 is missing: no update has been taken yet.",
        "paper_vetoed": "Figure 6 is missing: no update has been taken yet.",
    }
    notes += [reason for id, reason in missing.items() if id not in drawn]
    if "paper_vetoed" in drawn and run.recipe.get("objective", {}).get("veto") == "none":
        notes.append("Figure 6 stays at 0 unless another mask drops tokens: this run has no veto.")
    return notes


def held_out(evals: Sequence[Row]) -> list[Series]:
    """The held-out curves: the only set's, or each set's and their mean, with an interval at the last one."""
    measure, names = measure_in(evals), sets_in(evals)
    several = len(names) > 1
    label, name = (f"mean {measure}", MEAN) if several else (f"held-out {measure}", *names, MEAN)[:2]
    mean = replace(with_interval(evals, name, measure, label, "blue", "eval"), bold=several)
    sets = [
        Series(name, SET_COLORS[place % len(SET_COLORS)], "eval", column(evals, f"{measure}/{name}"), draw="dots")
        for place, name in enumerate(names)
    ]
    return [*(sets if several else []), mean]


def with_interval(evals: Sequence[Row], name: str, measure: str, label: str, color: str, axis: str) -> Series:
    """A held-out set's curve, or the mean's, with its intervals."""
    ends = [interval_in(row, name) for row in evals]
    low, high = ([None if both is None else rounded(both[end]) for both in ends] for end in (0, 1))
    return Series(label, color, axis, column(evals, f"{measure}/{name}"), draw="dots", low=low, high=high)


def _accuracy(run: RunData) -> Chart:
    measure = measure_in(run.evals)
    return Chart(
        "paper_accuracy",
        f"Figures 1, 2 and 3: average {measure}",
        "Unweighted mean of the held-out sets with its 95 % interval: over wall-clock Figure 1, over updates Figures 2 "
        "and 3.",
        held_out(run.evals),
        format="percent" if measure == "accuracy" else "number",
        wide=True,
    )
