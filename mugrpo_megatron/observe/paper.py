"""The paper's names for a run's metrics, and its two times (arXiv 2605.17570 and the authors' project page)."""

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
"""`objective.veto` -> the paper's symbol for the tokens that it drops."""

ROLLOUT_PHASES = ("sync", "generate", "score")
"""T_rollout: from the weight sync to the stage's last scored response."""

TRAINING_PHASES = (*ROLLOUT_PHASES, "logprobs", "optimize")
"""T_total: what every run needs, without evaluations and saves, whose number is the user's choice."""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


NAMES: tuple[tuple[str, str, str], ...] = (
    ("model updates", "`update`", "Counted from 0 over the whole run."),
    (
        "µ, staleness",
        "`schedule.updates_per_stage`, `staleness`",
        "`age` is the number of updates taken on a stage before the current one, 0 to µ x `schedule.passes` − 1; "
        "`staleness` is the same, and more where a stage was generated ahead (`schedule.max_sample_age`).",
    ),
    ("average accuracy, Avg.", "`accuracy/mean`", "Unweighted mean of `accuracy/<set>` over the held-out sets."),
    (
        "token clipping rate",
        "`clipped_fraction`",
        "Share of all response tokens of an update whose gradient the clip removes. The project page does not name its "
        "denominator.",
    ),
    (
        "E[ρ_t | A_t < 0]",
        "`ratio_neg_mean`",
        "Over all tokens of responses with negative advantage, vetoed ones included.",
    ),
    (
        "NAV-vetoed fraction",
        "`vetoed_fraction`",
        "Share of all response tokens. It also counts tokens that `sequence_mask`, `reject` or "
        '`second_moment = "drop"` removes.',
    ),
    (
        "trigger, T",
        "`trigger_tokens_*`, `trigger_responses_*`",
        "At six thresholds in every run; the veto uses `objective.trigger_ratio`.",
    ),
    (
        "κ",
        "`veto_first_trigger`",
        "The paper's κ is the position of a response's first trigger. The metric is its mean as a share of the "
        "response's length.",
    ),
    (
        "masks T, S_κ, H_κ, S_seq",
        "`dropped_*`",
        "Share of all response tokens that `veto` = `trigger`, `suffix`, `suffix_non_trigger`, `response` would drop.",
    ),
    ("average reward", "`reward_mean`", "Mean over the update's responses, which were sampled when their stage began."),
    (
        "T_rollout",
        "`paper_seconds` of summary.json",
        f"Sum of the phases {_listed(ROLLOUT_PHASES)}, in seconds, without a `sync` made only for an evaluation.",
    ),
    (
        "T_total",
        "`paper_seconds` of summary.json",
        f"T_rollout and the phases {_listed(TRAINING_PHASES[len(ROLLOUT_PHASES) :])}. Neither time includes `start`, "
        "`probe`, `eval` and `save`, also where they lie inside another phase. The project page does not say what its "
        "times include.",
    ),
)
"""The paper's name, ours, and a note for comparing the two."""


def paper_seconds(phases: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """T_rollout and T_total in seconds, from a run's phase rows.

    A phase inside another one counts with the outer one if it is one of `TRAINING_PHASES`, such as `logprobs` inside
    `optimize`. Any other, such as a save there, is subtracted. A `sync` made only for an evaluation does not count.
    What a resumed run repeats counts twice.
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
    """The veto's name in the legend of the paper's Figure 3."""
    return f"mask {SCOPES.get(str(objective.get('veto')), '?')}"


def _outermost(phases: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Phases inside no other, in order, with their seconds minus those of inner phases that do not count."""
    found: list[tuple[str, float]] = []
    outer_end = inner_end = float("-inf")
    for row in sorted(phases, key=lambda row: (row["start"], -row["end"])):
        name, start, end = itemgetter("phase", "start", "end")(row)
        if end > outer_end:
            found.append((name, end - start))
            outer_end, inner_end = end, start
        elif start >= inner_end and name not in TRAINING_PHASES:
            found[-1] = (found[-1][0], found[-1][1] - (end - start))
            inner_end = end
    return found
