"""Writes the sentence that sums up each section of the page, and chooses the sections that are collapsed at first."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from mugrpo_megatron.observe.metrics import Row, mean_in, values_in
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.results import format_difference, format_value, mean_of, sets_in
from mugrpo_megatron.observe.rundata import RunData
from mugrpo_megatron.report.charts import (
    COST,
    EPISODES,
    HEALTH,
    LEARNING,
    OPTIMIZATION,
    PAPER,
    RESPONSES,
    SAMPLES,
    TRIGGERS,
    VETO,
)
from mugrpo_megatron.report.triggers import mask_name, ratio_text, share_text, thresholds_of

MATTERS = 0.001
"""Fraction of vetoed tokens below which the sections about the veto are collapsed at first."""
PAPER_SETS = {"aime24", "aime25", "math500"}
"""Held-out sets of the paper's recipes."""


def remarks(run: RunData, summary: Mapping[str, Any]) -> dict[str, str]:
    """Section of the page -> the sentence that sums it up."""
    return {
        LEARNING: _learning(summary),
        SAMPLES: _samples(run.evals),
        HEALTH: _health(run),
        OPTIMIZATION: _optimization(run, summary),
        RESPONSES: _responses(run.stages),
        EPISODES: _episodes(run.stages),
        VETO: _veto(run),
        TRIGGERS: trigger_remark(run),
        PAPER: paper_remark(run),
        COST: _cost(summary),
    }


def collapsed_sections(run: RunData) -> set[str]:
    """The sections that are collapsed at first: those about the veto if it drops almost no token (MATTERS), and the one
    about the paper's figures unless the run evaluates all of PAPER_SETS."""
    vetoed = mean_in(run.updates, "vetoed_fraction") or 0.0
    unused = {VETO, TRIGGERS} if vetoed < MATTERS else set()
    return unused | (set() if set(sets_in(run.evals)) >= PAPER_SETS else {PAPER})


def _joined(parts: Iterable[str]) -> str:
    text = "; ".join(clause for clause in parts if clause)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _learning(summary: Mapping[str, Any]) -> str:
    measure, mean = summary["measure"], mean_of(dict(summary))
    before, after = mean["before"], mean["after"]
    if before is None and after is None:
        return "Not evaluated yet."
    if after is None:
        return (
            f"Held-out {measure} was {format_value(before, measure)} before training, and has not been measured since."
        )
    if before is None:
        return f"Held-out {measure} is {format_value(after, measure)}; before training it was not measured."
    change = f"Held-out {measure} went from {format_value(before, measure)} to {format_value(after, measure)}"
    first, last = mean["before_interval"], mean["interval"]
    if not first or not last:
        return f"{change} ({format_difference(after - before, measure)}), without a 95 % interval."
    apart = first[1] < last[0] or last[1] < first[0]
    what = ("a clear gain" if after > before else "a clear loss") if apart else "the 95 % intervals overlap"
    return f"{change} ({format_difference(after - before, measure)}): {what}."


def _samples(evals: Sequence[Row]) -> str:
    """A sentence about the last evaluation: the shares of its responses without an answer, and of those that were cut
    off."""
    if not evals:
        return "What the model wrote, and how it was scored."
    last = evals[-1]
    shares = [
        (text, mean_in([last], *(name for name in last if name.startswith(f"{base}/"))))
        for base, text in (("unparsed", "without an answer"), ("truncated", "cut off"))
    ]
    parts = ", ".join(f"{share_text(share)} {text}" for text, share in shares if share is not None)
    return f"Of the last evaluation's responses: {parts}." if parts else ""


def _health(run: RunData) -> str:
    updates, bound = run.updates, run.setting("schedule.max_kl")
    ess, nats = values_in(updates, "ess"), values_in(updates, "kl_response")
    if not ess:
        return ""
    limit = f"of {bound:g} " if bound else ""
    kind = "near on-policy" if min(ess) >= 0.9 else "stale, and usable" if ess[-1] >= 0.5 else "too stale to learn from"
    drops, holds = mean_in(updates, "vetoed_fraction") or 0.0, mean_in(updates, "clipped_fraction") or 0.0
    return _joined(
        [
            f"{kind}: ESS ends at {share_text(ess[-1])} of the tokens, {share_text(min(ess))} at the least",
            f"the veto and other masks drop {share_text(drops)} of the tokens, the clip holds {share_text(holds)}",
            f"a stage has moved {max(nats):.2g} {limit}nats a response at most" if nats else "",
        ]
    )


def _episodes(stages: Sequence[Row]) -> str:
    """A sentence about episodes: turns, calls and failures, as means over the stages."""
    names = ("turns", "called", "failed_calls", "lost", "tool_seconds")
    turns, called, failed, lost, seconds = (mean_in(stages, f"reward/episode.{name}") for name in names)
    if turns is None:
        return ""
    return _joined(
        [
            f"{turns:.3g} turns an episode; {share_text(called or 0.0)} call a tool",
            f"{failed or 0.0:.3g} calls an episode fail, {share_text(lost or 0.0)} of the episodes were dropped",
            f"each waits {seconds or 0.0:.3g} s for its tools",
        ]
    )


def _optimization(run: RunData, summary: Mapping[str, Any]) -> str:
    norms, entropy = values_in(run.updates, "grad_norm"), values_in(run.updates, "entropy")
    limit, skipped = run.setting("optimizer.clip_grad"), summary["skipped_updates"]
    if not norms:
        return ""
    return _joined(
        [
            f"{share_text(sum(norm > limit for norm in norms) / len(norms))} of the gradients were clipped"
            if limit
            else "",
            f"entropy went from {entropy[0]:.3g} to {entropy[-1]:.3g} nats" if entropy else "",
            f"{skipped:,} updates were skipped" if skipped else "no update was skipped",
        ]
    )


def _responses(stages: Sequence[Row]) -> str:
    if not stages:
        return ""
    first, last = stages[0].get("response_length_mean"), stages[-1].get("response_length_mean")
    flat, cut = stages[-1].get("zero_variance_fraction"), stages[-1].get("truncated_fraction")
    distance = stages[-1].get("mismatch_mean")
    return _joined(
        [
            f"mean length {first:.3g} → {last:.3g} tokens" if first and last else "",
            f"in the last stage {share_text(flat)} of the groups have no signal" if flat is not None else "",
            f"{share_text(cut)} of the responses are cut off" if cut is not None else "",
            f"engine and learner differ by {distance:.2g} nats a token" if distance is not None else "",
        ]
    )


def _veto(run: RunData) -> str:
    share = mean_in(run.updates, "vetoed_fraction")
    if run.recipe.get("objective", {}).get("veto") == "none" or share is None:
        return "This run has no veto; the map shows what its trigger_ratio would find."
    if (lost := mean_in(run.updates, "prefix_weight_lost")) is not None:
        return f"Weights by the prefix took {share_text(lost)} of the tokens that they apply to from the loss."
    few = ": too few to matter" if share < MATTERS else ""
    return f"The veto dropped {share_text(share)} of the tokens{few}."


def trigger_remark(run: RunData) -> str:
    """Sentences about triggers: the run's threshold and veto, and the shares of triggers at the measured threshold that
    is nearest to the run's. "" if the recipe has no `trigger_ratio`."""
    objective, thresholds = run.recipe.get("objective", {}), thresholds_of(run)
    if "trigger_ratio" not in objective:
        return ""
    ratio, scope = ratio_text(objective["trigger_ratio"]), objective["veto"]
    text = f"This run: trigger_ratio = {ratio}, veto = {scope} ({mask_name(objective)})."
    if not thresholds.names:
        return text
    at = thresholds.nearest
    tokens, responses = (mean_in(run.updates, f"trigger_{what}_{at}") for what in ("tokens", "responses"))
    if tokens is None or responses is None:
        return text
    return f"{text} At {at}, {share_text(tokens)} of the negative tokens and {share_text(responses)} of the responses."


def paper_remark(run: RunData) -> str:
    """A sentence with the run's settings in the words of the paper's legends."""
    objective = run.recipe.get("objective", {})
    clip = ", ".join(f"{objective[key]:g}" if key in objective else "?" for key in ("clip_low", "clip_high"))
    schedule = run.recipe.get("schedule", {})
    epochs = f" x {schedule['epochs']} epochs" if schedule.get("epochs", 1) != 1 else ""
    stage = f"{schedule.get('updates_per_stage', '?')}{epochs}"
    return f"This run's line: {objective.get('name', '?')}, µ = {stage}, clip [{clip}], {mask_name(objective)}"


def paper_notes(run: RunData, drawn: Container[str]) -> list[str]:
    """Sentences about the paper's figures: where Figure 4 is, and why a figure is missing or shows less than in the
    paper. `drawn` has the ids of the charts that the page shows."""
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


def _cost(summary: Mapping[str, Any]) -> str:
    seconds = summary["seconds"]
    total = seconds["total"] or 1.0
    largest = sorted(((name, took) for name, took in seconds.items() if name != "total"), key=lambda item: -item[1])[:2]
    shares = ", ".join(f"{100 * took / total:.0f} % of it {name}" for name, took in largest if took)
    return f"{duration(seconds['total'])}, {shares}." if shares else ""
