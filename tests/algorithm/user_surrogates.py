"""Surrogates of a user's own, as docs/own-functions.md describes them."""

from __future__ import annotations

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.segments import response_mean
from mugrpo_megatron.algorithm.surrogates import SurrogateLoss, TokenBatch
from mugrpo_megatron.recipe import ObjectiveSection

NOT_A_FUNCTION = 3


def none_clipped(tokens: TokenBatch) -> Tensor:
    return torch.zeros_like(tokens.advantage, dtype=torch.bool)


def again_ppo(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """`ppo` in other words."""
    ratio, advantage = tokens.ratio, tokens.advantage
    gain = torch.minimum(ratio * advantage, ratio.clamp(tokens.low, tokens.high) * advantage)
    beyond = (ratio < tokens.low) & (advantage < 0) | (ratio > tokens.high) & (advantage > 0)
    return SurrogateLoss(-gain, beyond)


def early_tokens(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """Weights that fall along the response."""
    return SurrogateLoss(-tokens.ratio * tokens.advantage / (1 + tokens.segments.positions), none_clipped(tokens))


def whole_response(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """The squared mean log-ratio of the response as a penalty."""
    drift = response_mean(tokens.log_ratio, tokens.segments)[tokens.segments.ids]
    return SurrogateLoss(-tokens.ratio * tokens.advantage + 0.1 * drift.square(), none_clipped(tokens))
