"""Numbers that depend on all tokens of an update and are needed before its first gradient: M2PO's bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.segments import LossInputs, running_sum
from mugrpo_megatron.algorithm.surrogates import log_ratios

M2PO_BUDGET = 0.04
"""Largest second moment in squared nats, the paper's recommendation (arXiv 2510.01161)."""


@dataclass(frozen=True, slots=True)
class UpdateStatistics:
    """Numbers that all micro-batches of an update share; scalars on the device of the log-probabilities."""

    log_clip: Tensor
    """float64 []: the clip range loses what lies outside [exp(-log_clip), exp(log_clip)]; inf does not change it."""
    log_drop: Tensor
    """float64 []: tokens whose log-ratio is larger than this in magnitude are dropped; inf drops none."""


def neutral_statistics(device: torch.device) -> UpdateStatistics:
    """Statistics that change nothing: both bounds are infinite."""
    unbounded = torch.full((), math.inf, dtype=torch.float64, device=device)
    return UpdateStatistics(unbounded, unbounded)


def update_statistics(logprobs: Tensor, inputs: LossInputs) -> UpdateStatistics:
    """Compute the statistics of a whole update; `neutral_statistics` if the objective needs none.

    `logprobs` [T] and `inputs` have ALL tokens of the update, the same on every data parallel rank.
    """
    neutral = neutral_statistics(logprobs.device)
    if not inputs.config.needs_statistics:
        return neutral
    log_ratio = log_ratios(logprobs.detach(), inputs.behaviour).double()
    if inputs.config.second_moment == "drop":
        return replace(neutral, log_drop=_m2po_drop(log_ratio, M2PO_BUDGET))
    advantage = inputs.advantages.double()[inputs.segments.ids]
    return replace(neutral, log_clip=_m2po_clip(log_ratio, advantage, M2PO_BUDGET))


def _m2po_clip(log_ratio: Tensor, advantage: Tensor, budget: float) -> Tensor:
    """The bound in nats to which log-ratios are clipped so that their mean square stays within `budget`.

    M2PO (arXiv 2510.01161) as its authors released it. It counts the n tokens that a clip can act on: those with A > 0,
    r > 1 or A < 0, r < 1. Let d_0 <= d_1 <= ... be their squared log-ratios. If their mean is within the budget, the
    bound is infinite. Otherwise k is the first index at which clipping all later tokens to d_k would exceed the budget,
    sum(d_0..d_k) + d_k (n - k - 1) >= budget n, and the bound is the root of d_(k-1), or 0 if k = 0.
    """
    harmful = ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))
    squares = torch.where(harmful, log_ratio.square(), 0.0).sort().values
    # n is an int and not a tensor, because `budget` times an integer tensor would be float32.
    n = int(harmful.sum())
    squares = squares[len(squares) - n :]
    sums = running_sum(squares)
    if n == 0 or sums[-1] <= budget * n:
        return torch.full((), math.inf, dtype=torch.float64, device=log_ratio.device)
    rest = n - 1 - torch.arange(n, device=squares.device)
    k = int((sums + squares * rest >= budget * n).int().argmax())
    return squares[k - 1].sqrt() if k else torch.zeros_like(squares[0])


def _m2po_drop(log_ratio: Tensor, budget: float) -> Tensor:
    """The largest |log-ratio| of a token that stays, such that the mean square of all that stay is below `budget`.

    At least one token stays, as in AReaL. Returns inf if there are no tokens.
    """
    squares = log_ratio.square().sort().values
    if not len(squares):
        return torch.full((), math.inf, dtype=torch.float64, device=log_ratio.device)
    means = running_sum(squares) / torch.arange(1, len(squares) + 1, device=squares.device)
    count = (means < budget).sum().clamp(min=1)
    return squares[count - 1].sqrt()
