"""The KL penalty that keeps the policy near a reference policy: a policy that stays fixed for the stage or for the run.

With d = log pi - log ref of a sampled token, Schulman's estimators of KL(pi | ref) are
(http://joschu.net/blog/kl-approx.html)

    k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d

In a term of the loss the mean of the gradient counts, not the mean of the value (Tang & Munos, arXiv 2506.09477). For a
token drawn from pi the mean gradient of k1 is 0, of k2 the gradient of KL(pi | ref), of k3 the gradient of
KL(ref | pi). But the behaviour policy beta has sampled the tokens, not pi. So a value of `objective.kl_penalty` that
ends with `_weighted` multiplies the estimate by the importance ratio: then the mean gradient of each estimator is the
gradient of KL(pi | ref) at any staleness (k3: DeepSeek-V3.2, arXiv 2512.02556, eq. 7). For k2 no gradient flows through
the ratio, because the mean gradient is right without it.

Every KL here is that of one token given its prefix, and the prefixes are those that beta sampled.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mugrpo_megatron.algorithm.segments import Segments
from mugrpo_megatron.algorithm.surrogates import LOG_RATIO_LIMIT, log_ratios
from mugrpo_megatron.recipe.objective import ObjectiveSection


def kl_estimate(logprobs: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(pi | ref) at each sampled token [T], in nats; differentiable in `logprobs` [T]."""
    d = log_ratios(logprobs, ref)
    if estimator == "k3":
        # d is clamped in both terms. If it were clamped only in exp(-d), the gradient of the term d would push the
        # log-probability of a token below the limit further down.
        d = d.clamp(min=-LOG_RATIO_LIMIT)
        return (-d).exp() - 1 + d
    return d.square() / 2 if estimator == "k2" else d


def kl_loss(logprobs: Tensor, ref: Tensor, log_ratio: Tensor, segments: Segments, config: ObjectiveSection) -> Tensor:
    """The KL penalty in each token's loss [T], with the token's weight in the update's loss.

    Tokens that the veto or a mask drops keep the penalty. They are dropped where the policy has become too different
    from the one that sampled, and there a penalty for its distance is needed most.

    Args:
        log_ratio: [T], log of current over behaviour probability.
    """
    estimator, _, weighted = config.kl_penalty.partition("_")
    estimate = kl_estimate(logprobs, ref, estimator)
    if weighted:
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        estimate = (ratio.detach() if estimator == "k2" else ratio) * estimate
        # As in the surrogates, a token beyond the clamp gets no gradient: a ratio of exp(20) would multiply it.
        saturated = log_ratio.detach().abs() > LOG_RATIO_LIMIT
        estimate = torch.where(saturated, estimate.detach(), estimate)
    return config.kl_coef * segments.weights.to(estimate.dtype)[segments.ids] * estimate


def rewards_less_kl(
    rewards: np.ndarray, behaviour: list[np.ndarray], ref: list[np.ndarray], config: ObjectiveSection
) -> np.ndarray:
    """Rewards [N] minus `kl_coef` times the sum of log beta - log ref over each response; float64 [N].

    This is InstructGPT's penalty (arXiv 2203.02155). beta is the behaviour policy, so the differences are known before
    the first update, and their sum is an unbiased estimate of the KL(beta | ref) of whole responses.
    """
    # float64, because a response of 10^4 tokens sums 10^4 differences of nearly equal numbers.
    drift = [np.subtract(beta, fixed, dtype=np.float64).sum() for beta, fixed in zip(behaviour, ref, strict=True)]
    return np.asarray(rewards, dtype=np.float64) - config.kl_coef * np.array(drift, dtype=np.float64)
