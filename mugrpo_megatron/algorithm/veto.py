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
turn, and nothing beyond the turn leaves the loss. In either case positions count only tokens that the policy sampled.

Two further values of `objective.veto` weigh tokens instead of dropping them, without a threshold. In a response with
negative advantage

    prefix               min(1, Π_{s < t} r_s)     PNPO (arXiv 2608.01418)
    prefix_min           min(1, min_{s < t} r_s)   MinPRO (arXiv 2601.22718)

multiplies the loss of token t: a token counts little if the policy has become unlikely to produce the tokens before it.
No gradient flows through the weight, and no weight is above 1. With `prefix_signs = "both"` tokens of all other
responses are weighed too.

Whether a token is a trigger depends on that token alone. So a pass over chunks in token order carries only κ, or the
sum or minimum of log-ratios, from one chunk to the next. The log-ratios are those before the losses clamp them to ±20
nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.segments import Segments
from mugrpo_megatron.recipe.objective import ObjectiveSection

PREFIX_WEIGHTS = ("prefix", "prefix_min")
"""Values of `objective.veto` that weigh tokens by their prefix."""
MARKED_WEIGHT = 0.5
"""Prefix weight below which reports show a token as vetoed."""
NEVER = torch.iinfo(torch.int64).max
"""Stands for the index of the first trigger in a response without a trigger."""


@dataclass(frozen=True, slots=True)
class VetoState:
    """What the veto carries of N responses from one chunk of tokens to the next.

    With `objective.veto_reach = "turn"` both tensors have an entry for each turn instead of each response,
    [N * most_turns], numbered as in `Segments.turn_ids`.
    """

    first_trigger: Tensor
    """int64 [N]: κ of each response, the position of its first trigger so far, `NEVER` without one."""
    log_prefix: Tensor
    """float64 [N]: with `prefix` the sum of each response's log-ratios so far, with `prefix_min` the smallest of 0 and
    these log-ratios; with other values of `objective.veto` it stays 0."""


@dataclass(frozen=True, slots=True)
class KeepMask:
    """Tokens that stay in the loss, their prefix weights, and the veto's state after them."""

    keep: Tensor
    """bool [T]: whether a token stays in the loss."""
    state: VetoState
    weight: Tensor | None = None
    """[T], in [0, 1]: the prefix weight of each token; None stands for 1."""

    @property
    def marked(self) -> Tensor:
        """bool [T]: the tokens that reports show as vetoed.

        These are the tokens out of the loss or, with prefix weights, those with a weight below `MARKED_WEIGHT`.
        """
        return ~self.keep if self.weight is None else self.weight < MARKED_WEIGHT


def initial_state(segments: Segments, config: ObjectiveSection) -> VetoState:
    """The veto's state before any token."""
    units = segments.responses * (segments.most_turns if config.veto_reach == "turn" else 1)
    return VetoState(segments.lengths.new_full((units,), NEVER), segments.lengths.new_zeros(units, dtype=torch.float64))


def veto_unit(segments: Segments, config: ObjectiveSection) -> Tensor:
    """int64 [T]: the unit of each token, within which a trigger vetoes tokens.

    That is its response, or its turn if `config.veto_reach` is "turn".
    """
    return segments.turn_ids() if config.veto_reach == "turn" else segments.ids


def veto(
    log_ratio: Tensor, advantage: Tensor, segments: Segments, config: ObjectiveSection, state: VetoState
) -> KeepMask:
    """Apply the veto to the next chunk of tokens, given the state after the previous one.

    Args:
        log_ratio: [T], log of current over behaviour probability, not clamped; no gradient flows through it.
        advantage: [T], for each token the advantage of its response, without a teacher's part.
        state: `initial_state`, or the state after the earlier tokens of the same responses.
    """
    threshold = math.log(config.trigger_ratio) if config.trigger_ratio > 0 else -math.inf
    log_ratio = log_ratio.detach()
    triggers = (advantage < 0) & (log_ratio < threshold)
    candidates = torch.where(triggers, segments.positions, NEVER)
    unit = veto_unit(segments, config)
    first = state.first_trigger.scatter_reduce(0, unit, candidates, "amin")
    if config.veto not in PREFIX_WEIGHTS:
        keep = _SCOPES[config.veto](triggers, segments.positions, first[unit])
        return KeepMask(keep, VetoState(first, state.log_prefix))
    before, log_prefix = _prefix(log_ratio.double(), unit, state.log_prefix, config)
    weight = torch.where(weighed_by_prefix(advantage, config), before.clamp(max=0), 0.0).exp().to(log_ratio.dtype)
    return KeepMask(weight > 0, VetoState(first, log_prefix), weight)


def weighed_by_prefix(advantage: Tensor, config: ObjectiveSection) -> Tensor:
    """bool [T]: whether a token is weighed by its prefix; `advantage` [T] is that of the token's response."""
    return (advantage < 0) | (config.prefix_signs == "both")


def _prefix(log_ratio: Tensor, unit: Tensor, log_prefix: Tensor, config: ObjectiveSection) -> tuple[Tensor, Tensor]:
    """The sum or minimum [T] of the log-ratios that stand before each token in its response or turn (`unit` [T]), and
    `VetoState.log_prefix` after all tokens."""
    minimum = config.veto == "prefix_min"
    same = unit[1:] == unit[:-1]
    before = log_prefix[unit]
    before = torch.cat([before[:1], torch.where(same, log_ratio[:-1], before[1:])])
    if minimum:
        # A unit's first value is the minimum that the previous chunk left, which is 0 before a unit's first token.
        return _scan(before, unit, torch.minimum), log_prefix.scatter_reduce(0, unit, log_ratio, "amin")
    return _scan(before, unit, torch.add), log_prefix.index_add(0, unit, log_ratio)


def _scan(values: Tensor, unit: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The running sum or minimum (`combine`) of `values` [T] within each unit, bitwise the same in any packing."""
    # torch.cumsum is not used: on CUDA it adds floats in no fixed order. Nor are differences of one sum over all
    # tokens: their rounding would depend on the other responses.
    reach = 1
    while reach < len(values):
        within = unit[reach:] == unit[:-reach]
        combined = torch.where(within, combine(values[reach:], values[:-reach]), values[reach:])
        values = torch.cat([values[:reach], combined])
        reach *= 2
    return values


# Each scope: (triggers [T], positions [T], κ of the token's response [T]) -> bool [T], tokens that stay.
_SCOPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda triggers, positions, first: torch.ones_like(triggers),
    "trigger": lambda triggers, positions, first: ~triggers,
    "suffix": lambda triggers, positions, first: positions <= first,
    "suffix_non_trigger": lambda triggers, positions, first: (positions <= first) | triggers,
    "response": lambda triggers, positions, first: first == NEVER,
}


THRESHOLDS = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6")
"""The thresholds of the ratio in `TRIGGER_METRICS`, as they stand in the names, in decreasing order."""

_MEANINGS = (
    (
        "trigger_tokens",
        "share of the tokens with negative advantage that are triggers at {th}: their ratio is below it",
    ),
    ("trigger_responses", "share of negative responses that have a token whose ratio is below {th}"),
    ("dropped_trigger", "share of response tokens that the scope `trigger` (T) would drop at {th}"),
    ("dropped_suffix", "share of response tokens that the scope `suffix` (S_κ) would drop at {th}"),
    (
        "dropped_suffix_non_trigger",
        "share of response tokens that the scope `suffix_non_trigger` (H_κ) would drop at {th}",
    ),
    ("dropped_response", "share of response tokens that the scope `response` (S_seq) would drop at {th}"),
)
TRIGGER_METRICS: tuple[tuple[str, str, str], ...] = tuple(
    (f"{name}_{th}", "fraction", meaning.format(th=th)) for name, meaning in _MEANINGS for th in THRESHOLDS
)
"""Name, unit and meaning of every metric of `trigger_metrics`."""


def trigger_metrics(
    log_ratio: Tensor, advantages: Tensor, segments: Segments, config: ObjectiveSection
) -> dict[str, Tensor]:
    """The metrics of `TRIGGER_METRICS`, each float64 [], of the T tokens of N whole responses.

    Without tokens the result is empty. If no response has a negative advantage, `trigger_tokens` and
    `trigger_responses` are left out. One pass finds the tokens below the largest threshold, the only ones that are
    compared with the smaller thresholds.

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
    first = initial_state(segments, config).first_trigger[:, None].expand(-1, len(THRESHOLDS))
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
