"""Weights by the prefix instead of a veto, as a user's surrogate; six_prefix.toml tries them.

In a response with negative advantage a token weighs min(1, product), or min(1, minimum), of the importance ratios of
the tokens before it, without a gradient through the weight (MinPRO, arXiv 2601.22718; PNPO, arXiv 2608.01418). So it is
a veto without a threshold: a token behind a prefix that the policy has left counts little.
"""

from __future__ import annotations

from torch import Tensor

from mugrpo_megatron.algorithm.surrogates import Terms, Tokens, ppo
from mugrpo_megatron.recipe.objective import ObjectiveSection


def product(tokens: Tokens, config: ObjectiveSection) -> Terms:
    """PPO's loss, by the probability ratio of the prefix."""
    return _weighted(tokens, config, _by_response(tokens).cumsum(dim=1))


def minimum(tokens: Tokens, config: ObjectiveSection) -> Terms:
    """PPO's loss, by the smallest ratio in the prefix."""
    return _weighted(tokens, config, _by_response(tokens).cummin(dim=1).values)


def _by_response(tokens: Tokens) -> Tensor:
    """Log-ratios [N, 1 + longest], without a gradient: 0, and then those of the response's tokens."""
    segments = tokens.segments
    padded = tokens.log_ratio.new_zeros(segments.responses, 1 + int(segments.lengths.max()))
    padded[segments.ids, segments.positions + 1] = tokens.log_ratio.detach()
    return padded


def _weighted(tokens: Tokens, config: ObjectiveSection, before: Tensor) -> Terms:
    """`before` [N, 1 + longest]: the log-weight of each token at its position, not yet capped at 0."""
    weight = before[tokens.segments.ids, tokens.segments.positions].clamp(max=0.0).exp()
    terms = ppo(tokens, config)
    return Terms(terms.loss * weight.where(tokens.advantage < 0, 1.0), terms.clipped)
