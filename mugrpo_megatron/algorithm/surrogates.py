"""Token losses: what one token contributes, given its importance ratio and its advantage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.segments import Segments, response_mean, response_sum
from mugrpo_megatron.recipe.objective import ObjectiveSection

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within this many nats before exp: exp(20) is 4.9e8, finite in every type but float16."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Losses of T tokens before weights, and which of them the clip holds back."""

    loss: Tensor
    """[T]"""
    clipped: Tensor
    """bool [T]: the clip takes the token's gradient away (`ppo`) or caps its weight (`cispo`, `topr`)."""


def log_ratios(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """log pi - log behaviour [T], in float64 where `logprobs` are and in float32 otherwise."""
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return logprobs.to(dtype) - behaviour.to(dtype)


def importance_ratio(log_ratio: Tensor, segments: Segments, config: ObjectiveSection) -> Tensor:
    """Importance ratio [T] at the level that `config.ratio` names, from token log-ratios [T]; differentiable.

    `token`: r_t = exp(l_t). `sequence_mean`: exp(mean_t l_t) (GSPO, arXiv 2507.18071, eq. 7).
    `sequence`: exp(sum_t l_t), the trajectory's ratio (TOPR, arXiv 2503.14286).
    """
    level = _LEVELS[config.ratio](log_ratio, segments)
    return level.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def around(centre: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The clip range moved from 1 to `centre` [T]: [max(centre - (1 - low), 0), centre + (high - 1)], each [T].

    Off-policy GRPO's f_eps (arXiv 2505.22257): the ratio pi / beta is clipped within eps of pi_ref / beta, the ratio of
    the policy that the iteration started from. `centre` is that ratio; no gradient flows through it.
    """
    return (centre - (1 - low)).clamp(min=0), centre + (high - 1)


def total_variation(ratio: Tensor) -> Tensor:
    """|r - 1| / 2 [T]: token by token what, of whole responses, has the total variation as its mean under beta.

    The lower bound of arXiv 2505.22257 (theorem 1) penalises the total variation between distributions of responses;
    on the ratios of tokens this is an approximation of it.
    """
    return (ratio - 1).abs() / 2


def ppo(ratio: Tensor, logprobs: Tensor, advantage: Tensor, low: Tensor, high: Tensor, dual: float | None) -> Terms:
    """-min(r A, clip(r, low, high) A) (PPO, arXiv 1707.06347, eq. 7); with `dual`, max(., dual A) where A < 0."""
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = torch.where(advantage > 0, ratio > high, (advantage < 0) & (ratio < low))
    if dual is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, dual * advantage), gain)
        clipped = clipped | ((advantage < 0) & (ratio > dual))
    return Terms(-gain, clipped)


def cispo(ratio: Tensor, logprobs: Tensor, advantage: Tensor, low: Tensor, high: Tensor, dual: float | None) -> Terms:
    """-sg(clip(r, low, high)) A log pi (CISPO, arXiv 2506.13585, eq. 4): every token keeps its gradient."""
    weight = ratio.detach().clamp(low, high)
    return Terms(-weight * advantage * logprobs, weight != ratio.detach())


def topr(ratio: Tensor, logprobs: Tensor, advantage: Tensor, low: Tensor, high: Tensor, dual: float | None) -> Terms:
    """-A log pi where A > 0, -sg(clip(r, low, high)) A log pi where A < 0 (TOPR, arXiv 2503.14286)."""
    tapered = ratio.detach().clamp(low, high)
    weight = torch.where(advantage > 0, torch.ones_like(tapered), tapered)
    return Terms(-weight * advantage * logprobs, (advantage < 0) & (tapered != ratio.detach()))


_LEVELS: dict[str, Callable[[Tensor, Segments], Tensor]] = {
    "token": lambda log_ratio, segments: log_ratio,
    "sequence_mean": lambda log_ratio, segments: response_mean(log_ratio, segments)[segments.ids],
    "sequence": lambda log_ratio, segments: response_sum(log_ratio, segments)[segments.ids],
}
SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float | None], Terms]] = {
    "ppo": ppo,
    "cispo": cispo,
    "topr": topr,
}
