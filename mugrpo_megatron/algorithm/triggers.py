"""What the veto would drop at thresholds from 1e-1 to 1e-6, from an update's log-ratios.

Every run, with any veto and threshold, reports the number of triggers (`algorithm.veto`) below each threshold, on each
token's own ratio, and the number of tokens that each scope would then drop. So a threshold and a scope can be chosen
without a second run.

Counts are enough. With R responses that have a trigger, T triggers in all and κ the position of a response's first one,
the scopes drop: trigger T tokens; suffix S = the sum of (length - 1 - κ); suffix_non_trigger S - (T - R), since all
triggers but the first ones are in a suffix; response the sum of lengths. A higher threshold never lowers T, R, S or
the tokens of whole responses; it may lower S - (T - R), where more of a suffix become triggers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.segments import Segments
from mugrpo_megatron.algorithm.veto import NEVER

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
METRICS: tuple[tuple[str, str, str], ...] = tuple(
    (f"{name}_{th}", "fraction", meaning.format(th=th)) for name, meaning in _MEANINGS for th in THRESHOLDS
)
"""Name, unit and meaning of every metric of `metrics`."""


def metrics(log_ratio: Tensor, advantages: Tensor, segments: Segments) -> dict[str, Tensor]:
    """`METRICS` by name, float64 [], of T tokens of N whole responses.

    Without negative responses their shares are left out; without tokens, all metrics. One pass over tokens finds those
    below the largest threshold; the rest is arithmetic on these few.

    Args:
        log_ratio: [T], log of current over behaviour probability, not clamped.
        advantages: [N].
    """
    if not len(log_ratio):
        return {}
    bounds = torch.tensor([math.log(float(th)) for th in THRESHOLDS], dtype=log_ratio.dtype, device=log_ratio.device)
    negative = advantages < 0
    found = (negative[segments.ids] & (log_ratio < bounds[0])).nonzero()[:, 0]
    below = log_ratio[found, None] < bounds
    positions = torch.where(below, segments.positions[found, None], NEVER)
    response = segments.ids[found]
    first = positions.new_full((segments.responses, len(THRESHOLDS)), NEVER)
    first = first.scatter_reduce(0, response[:, None].expand_as(positions), positions, "amin")
    triggered = first != NEVER
    lengths = segments.lengths[:, None]
    triggers, responses = below.sum(0).double(), triggered.sum(0).double()
    suffix = torch.where(triggered, lengths - 1 - first, 0).sum(0).double()
    dropped = {
        "trigger": triggers,
        "suffix": suffix,
        "suffix_non_trigger": suffix - (triggers - responses),
        "response": torch.where(triggered, lengths, 0).sum(0).double(),
    }
    shares = {f"dropped_{scope}": tokens / len(log_ratio) for scope, tokens in dropped.items()}
    if (negatives := segments.lengths * negative).any():
        shares["trigger_tokens"] = triggers / negatives.sum()
        shares["trigger_responses"] = responses / (negatives > 0).sum()
    return {f"{name}_{th}": value for name, row in shares.items() for th, value in zip(THRESHOLDS, row, strict=True)}
