"""Losses of part eight that no key of the recipe has, as users' functions."""

from __future__ import annotations

from mugrpo_megatron.algorithm.surrogates import SurrogateLoss, TokenBatch, ppo
from mugrpo_megatron.recipe.objective import ObjectiveSection


def decoupled_truncated(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """Decoupled PPO whose weight for age is truncated at 1: min(1, p) min(r/p A, clip(r/p, low, high) A).

    r is the importance ratio of the policy and p that of the proximal policy, so p is the age and r/p the step since.
    Needs `clip_centre = "proximal_scaled"`, which gives `ppo` the loss p min(r/p A, clip(r/p) A). The truncation is
    V-trace's, with a bound of 1 (IMPALA, arXiv 1802.01561, section 4.1).
    """
    terms = ppo(tokens, config)
    proximal = tokens.high / config.clip_high
    return SurrogateLoss(terms.loss / proximal.clamp(min=1), terms.clipped)
