"""The names of the mu-GRPO paper (arXiv 2605.17570, and the authors' project page) for what a run measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
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
        f"Sum of the phases {_listed(ROLLOUT_PHASES)}, in seconds, without a `sync` that serves an evaluation alone.",
    ),
    (
        "T_total",
        "`paper_seconds` of summary.json",
        f"T_rollout and the phases {_listed(TRAINING_PHASES[len(ROLLOUT_PHASES) :])}, without the saves during "
        "`optimize`. `start`, `eval` and `save` are in neither. The project page does not say what its times include.",
    ),
)
"""The paper's name, ours, and what to know when the two are compared."""


def paper_seconds(phases: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """T_rollout and T_total in seconds, out of a run's phase rows.

    A phase inside another one, as a save inside `optimize`, counts for neither and is taken out of the outer one. Nor
    does a `sync` count that serves an evaluation alone. What a resumed run did twice counts twice.
    """
    ran = [(name, seconds) for name, seconds in _outermost(phases) if name != "eval"]
    own: dict[str, float] = {}
    for (name, seconds), (following, _) in pairwise([*ran, ("", 0.0)]):
        if name != "sync" or following == "generate":
            own[name] = own.get(name, 0.0) + seconds
    return {
        "T_rollout": sum(own.get(name, 0.0) for name in ROLLOUT_PHASES),
        "T_total": sum(own.get(name, 0.0) for name in TRAINING_PHASES),
    }


def mask_name(objective: Mapping[str, object]) -> str:
    """The paper's name of an objective's veto, as in the legend of its Figure 3."""
    return f"mask {SCOPES.get(str(objective.get('veto')), '?')}"


def _outermost(phases: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Phases that run inside no other, in order, with their seconds less those of phases inside them."""
    found: list[tuple[str, float]] = []
    outer_end = inner_end = float("-inf")
    for row in sorted(phases, key=lambda row: (row["start"], -row["end"])):
        name, start, end = itemgetter("phase", "start", "end")(row)
        if end > outer_end:
            found.append((name, end - start))
            outer_end, inner_end = end, start
        elif start >= inner_end:
            found[-1] = (found[-1][0], found[-1][1] - (end - start))
            inner_end = end
    return found
