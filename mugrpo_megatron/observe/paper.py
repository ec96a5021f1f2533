"""The names of the mu-GRPO paper (arXiv 2605.17570, and the authors' project page) for what a run measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

SCOPES: dict[str, str] = {
    "none": "∅",
    "trigger": "T",
    "suffix": "S_κ",
    "suffix_non_trigger": "H_κ",
    "response": "S_seq",
}
"""`objective.veto` -> the paper's letter for the tokens that it drops."""

ROLLOUT_PHASES = ("sync", "generate", "score")
"""T_rollout: from the weights' way into the engine to the stage's last scored response."""

TRAINING_PHASES = (*ROLLOUT_PHASES, "logprobs", "optimize")
"""T_total: what every run of the method has to do. How often a run evaluates and saves is its owner's choice."""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


NAMES: tuple[tuple[str, str, str], ...] = (
    ("model updates", "`update`", "Counted from 0 over the whole run."),
    (
        "µ, staleness",
        "`schedule.updates_per_stage`, `age`",
        "`age` is how many updates a stage's responses are old, 0 to µ − 1.",
    ),
    ("average accuracy, Avg.", "`accuracy/mean`", "Unweighted mean of `accuracy/<set>` over the held-out sets."),
    (
        "token clipping rate",
        "`clipped_fraction`",
        "Share of all response tokens of an update whose gradient the clip takes away. The project page names no "
        "denominator.",
    ),
    (
        "E[ρ_t | A_t < 0]",
        "`ratio_neg_mean`",
        "Over all tokens of responses with negative advantage, those that the veto drops included.",
    ),
    (
        "NAV-vetoed fraction",
        "`vetoed_fraction`",
        'Share of all response tokens. It also counts tokens that `sequence_mask` or `second_moment = "drop"` takes '
        "out.",
    ),
    (
        "trigger, T",
        "`trigger_tokens_*`, `trigger_responses_*`",
        "At six thresholds in every run; `objective.trigger_ratio` is the one that the veto uses.",
    ),
    (
        "κ",
        "`veto_first_trigger`",
        "The paper's κ is the position of a response's first trigger; here its mean, as a share of the response's "
        "length.",
    ),
    (
        "masks T, S_κ, H_κ, S_seq",
        "`dropped_*`",
        "Share of all response tokens that `veto` = `trigger`, `suffix`, `suffix_non_trigger`, `response` would drop.",
    ),
    ("average reward", "`reward_mean`", "Of the responses that an update was trained on, as old as their stage."),
    (
        "T_rollout",
        "`paper_seconds` of summary.json",
        f"Sum of the phases {_listed(ROLLOUT_PHASES)}, in seconds.",
    ),
    (
        "T_total",
        "`paper_seconds` of summary.json",
        f"Sum of the phases {_listed(TRAINING_PHASES)}, less what runs inside one of them: a save or an evaluation "
        "during `optimize`. `start`, `eval` and `save` are in neither. The project page does not say what its times "
        "include.",
    ),
)
"""The paper's name, ours, and what to know when the two are compared."""


def paper_seconds(phases: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """T_rollout and T_total in seconds, out of a run's phase rows.

    A phase inside another one, as a save or an evaluation inside `optimize`, counts for neither and is taken out of
    the outer one. What a resumed run did twice counts twice.
    """
    own = _without_inner(phases)
    return {
        "T_rollout": sum(own.get(name, 0.0) for name in ROLLOUT_PHASES),
        "T_total": sum(own.get(name, 0.0) for name in TRAINING_PHASES),
    }


def mask_name(objective: Mapping[str, object]) -> str:
    """The paper's name of an objective's veto, as in the legend of its Figure 3."""
    return f"mask {SCOPES.get(str(objective.get('veto')), '?')}"


def _without_inner(phases: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each outermost phase, less the phases that ran inside it."""
    seconds: dict[str, float] = {}
    outer, outer_end, inner_end = "", float("-inf"), float("-inf")
    for row in sorted(phases, key=lambda row: (row["start"], -row["end"])):
        name, start, end = itemgetter("phase", "start", "end")(row)
        if end > outer_end:
            outer, outer_end, inner_end = name, end, start
            seconds[name] = seconds.get(name, 0.0) + end - start
        elif start >= inner_end:
            seconds[outer] -= end - start
            inner_end = end
    return seconds
