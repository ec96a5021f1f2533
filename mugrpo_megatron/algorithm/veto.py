"""The negative-advantage veto (mu-GRPO, arXiv 2605.17570; definitions of the authors' project page).

A trigger is a token of a negative-advantage response that has become extremely unlikely under the current policy: its
ratio to the behaviour policy is below `trigger_ratio`. T is the set of a response's triggers, κ the position of the
first one.
The tokens after κ follow a prefix that the policy would no longer produce. The scope says which tokens are dropped:

    none                 ∅                   nothing
    trigger              T                   the triggers
    suffix               S_κ = {t : t > κ}   every token after the first trigger, later triggers too; the first stays
    suffix_non_trigger   H_κ = S_κ − T       the tokens after the first trigger that are not triggers
    response             S_seq               the whole response

With `objective.veto_reach = "turn"`, every turn of an episode is treated as a response: κ is the first trigger of the
turn, and nothing beyond the turn leaves the loss. Positions count sampled tokens in either case.

Whether a token is a trigger depends on that token alone, so a pass in token order carries no more than κ from one chunk
to the next. Ratios are compared as log-ratios before the clamp of ±20 nats that the losses apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.segments import Segments
from mugrpo_megatron.recipe.objective import ObjectiveSection

NEVER = torch.iinfo(torch.int64).max
"""First trigger of a response that has none."""


@dataclass(frozen=True, slots=True)
class KeepMask:
    """Tokens that stay in the loss, and the veto's state after them."""

    keep: Tensor
    """bool [T]"""
    first_trigger: Tensor
    """int64 [N]: κ of each response, the position of its first trigger so far, `NEVER` without one.

    With `objective.veto_reach = "turn"`, κ of each turn: [N * most_turns], numbered as in `Segments.turn_ids`.
    """


def initial_state(segments: Segments, config: ObjectiveSection) -> Tensor:
    """`KeepMask.first_trigger` before any token."""
    turns = segments.most_turns if config.veto_reach == "turn" else 1
    return segments.lengths.new_full((segments.responses * turns,), NEVER)


def veto_unit(segments: Segments, config: ObjectiveSection) -> Tensor:
    """int64 [T]: the response of each token, or its turn: a trigger vetoes tokens of the same unit only."""
    return segments.turn_ids() if config.veto_reach == "turn" else segments.ids


def veto(
    log_ratio: Tensor, advantage: Tensor, segments: Segments, config: ObjectiveSection, first_trigger: Tensor
) -> KeepMask:
    """Apply the veto to the next chunk of tokens, given the state after the previous one.

    Args:
        log_ratio: [T], log of current over behaviour probability, not clamped.
        advantage: [T], each token's advantage.
    """
    threshold = math.log(config.trigger_ratio) if config.trigger_ratio > 0 else -math.inf
    triggers = (advantage < 0) & (log_ratio.detach() < threshold)
    candidates = torch.where(triggers, segments.positions, NEVER)
    unit = veto_unit(segments, config)
    first = first_trigger.scatter_reduce(0, unit, candidates, "amin")
    return KeepMask(_SCOPES[config.veto](triggers, segments.positions, first[unit]), first)


# Each scope: (triggers [T], positions [T], κ of the token's response [T]) -> bool [T], tokens that stay.
_SCOPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda triggers, positions, first: torch.ones_like(triggers),
    "trigger": lambda triggers, positions, first: ~triggers,
    "suffix": lambda triggers, positions, first: positions <= first,
    "suffix_non_trigger": lambda triggers, positions, first: (positions <= first) | triggers,
    "response": lambda triggers, positions, first: first == NEVER,
}


THRESHOLDS = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6")
"""Ratios as written in metric names, in decreasing order."""

_MEANINGS = (
    ("trigger_tokens", "tokens with negative advantage whose ratio is below {th}: triggers at that threshold"),
    ("trigger_responses", "negative responses with a token whose ratio is below {th}"),
    ("dropped_trigger", "response tokens that scope trigger (T) would drop at threshold {th}"),
    ("dropped_suffix", "response tokens that scope suffix (S_κ) would drop at threshold {th}"),
    ("dropped_suffix_non_trigger", "response tokens that scope suffix_non_trigger (H_κ) would drop at threshold {th}"),
    ("dropped_response", "response tokens that scope response (S_seq) would drop at threshold {th}"),
)
TRIGGER_METRICS: tuple[tuple[str, str, str], ...] = tuple(
    (f"{name}_{th}", "fraction", meaning.format(th=th)) for name, meaning in _MEANINGS for th in THRESHOLDS
)
"""Name, unit and meaning of every metric of `trigger_metrics`."""


def trigger_metrics(
    log_ratio: Tensor, advantages: Tensor, segments: Segments, config: ObjectiveSection
) -> dict[str, Tensor]:
    """`TRIGGER_METRICS` by name, float64 [], of T tokens of N whole responses.

    Fractions of negative responses are left out if there are none, all metrics if there are no tokens. One pass over
    tokens finds those below the largest threshold; the rest is arithmetic on these few.

    Args:
        log_ratio: [T], log of current over behaviour probability, not clamped.
        advantages: [N].
    """
    if not len(log_ratio):
        return {}
    bounds = torch.tensor([math.log(float(th)) for th in THRESHOLDS], dtype=log_ratio.dtype, device=log_ratio.device)
    negative = advantages < 0
    candidates = (negative[segments.ids] & (log_ratio < bounds[0])).nonzero()[:, 0]
    below = log_ratio[candidates, None] < bounds
    positions = torch.where(below, segments.positions[candidates, None], NEVER)
    unit = veto_unit(segments, config)
    first = initial_state(segments, config)[:, None].expand(-1, len(THRESHOLDS))
    first = first.scatter_reduce(0, unit[candidates, None].expand_as(positions), positions, "amin")
    triggered = first != NEVER
    zeros = positions.new_zeros(len(first))
    lengths = zeros.index_add(0, unit, torch.ones_like(unit))[:, None]
    last = zeros.scatter_reduce(0, unit, segments.positions, "amax")[:, None]
    triggers, firsts = below.sum(0).double(), triggered.sum(0).double()
    suffix = torch.where(triggered, last - first, 0).sum(0).double()
    dropped = {
        "trigger": triggers,
        "suffix": suffix,
        "suffix_non_trigger": suffix - (triggers - firsts),
        "response": torch.where(triggered, lengths, 0).sum(0).double(),
    }
    responses = triggered.view(segments.responses, -1, len(THRESHOLDS)).any(1).sum(0).double()
    fractions = {f"dropped_{scope}": tokens / len(log_ratio) for scope, tokens in dropped.items()}
    if (negatives := segments.lengths * negative).any():
        fractions["trigger_tokens"] = triggers / negatives.sum()
        fractions["trigger_responses"] = responses / (negatives > 0).sum()
    return {f"{name}_{th}": value for name, row in fractions.items() for th, value in zip(THRESHOLDS, row, strict=True)}
