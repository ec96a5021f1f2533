"""Losses and advantages that part eight explores, as users' functions: CPPO, an interpolated clip centre, a baseline
below the mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mugrpo_megatron.algorithm.surrogates import SurrogateLoss, TokenBatch, ppo
from mugrpo_megatron.recipe.objective import ObjectiveSection

LIMIT = 0.15
"""CPPO's delta, the limit of a token's weighted distance: the paper's for dense models (table 3)."""
LAST_WEIGHT = 0.8
"""CPPO's w_min, the weight of a response's last token; the first one weighs 1."""
BUDGET = 0.02
"""CPPO's smallest budget, a mean distance of the prefix; a response's own is at most twice as large (equation 22)."""
TOWARDS_POLICY = 0.5
"""How far the interpolated centre lies on the way from the policy that sampled to the current one, in log-probability.
A-3PO takes (d - 1) / d, with d the age in updates; a user's loss is not told the age."""
SHIFT = 0.1
"""By how much the baseline lies below the group's mean reward; AsymRE's paper advises a small shift."""


def cppo(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """-r A, and 0 on tokens outside CPPO's trust region (arXiv 2606.10968, equations 8 to 11).

    A token is outside when its step leads away from the policy that sampled, and its weighted distance |p - m| exceeds
    `LIMIT`, or what the tokens before it have left of the response's budget. p is the token's probability now, m the
    probability with which it was sampled.
    """
    distance = (tokens.logprobs.detach().exp() - tokens.behaviour.exp()).abs()
    lengths = torch.unique_consecutive(tokens.segments.ids, return_counts=True)[1]
    far = torch.cat([_outside(response) for response in distance.split(lengths.tolist())])
    away = tokens.advantage * (tokens.ratio.detach() - 1) > 0
    return SurrogateLoss(torch.where(away & far, 0.0, -tokens.ratio * tokens.advantage), away & far)


def _outside(distance: Tensor) -> Tensor:
    """bool [t]: the tokens of one response whose weighted distance exceeds its limit; `distance` [t] is |p - m|."""
    last = len(distance) - 1
    to_the_end = torch.arange(last, -1, -1, dtype=distance.dtype, device=distance.device)
    weight = LAST_WEIGHT + (1 - LAST_WEIGHT) * to_the_end / max(last, 1)
    spent = weight * distance
    budget = distance.quantile(0.9).clamp(BUDGET, 2 * BUDGET)
    left = budget * (weight.cumsum(0) - weight) - (spent.cumsum(0) - spent)
    return spent > LIMIT + left.clamp(max=0)


def interpolated(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """Decoupled PPO without a forward pass: the clip's centre is interpolated (A-3PO, arXiv 2512.06547).

    c min(r/c A, clip(r/c, low, high) A) with c = r^`TOWARDS_POLICY`, through which no gradient flows.
    """
    centre = tokens.ratio.detach() ** TOWARDS_POLICY
    return ppo(replace(tokens, low=tokens.low * centre, high=tokens.high * centre), config)


def below_mean(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """AsymRE's advantages [N], A = r - V (arXiv 2506.20520), with V the group's mean reward minus `SHIFT`."""
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    return rewards - (np.bincount(group, rewards) / sizes)[group] + SHIFT
