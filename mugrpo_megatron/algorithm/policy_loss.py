"""The loss of an update: token losses x veto x weights, KL penalty, entropy bonus. One signature for all objectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mugrpo_megatron.algorithm import diagnostics
from mugrpo_megatron.algorithm.masks import keep_mask
from mugrpo_megatron.algorithm.ref_kl import kl_loss
from mugrpo_megatron.algorithm.segments import Segments
from mugrpo_megatron.algorithm.statistics import UpdateStatistics, update_statistics
from mugrpo_megatron.algorithm.surrogates import (
    TokenBatch,
    entropy_loss,
    importance_ratio,
    log_ratios,
    recentre_clip,
    surrogate_of,
    user_metrics,
)
from mugrpo_megatron.algorithm.veto import initial_state
from mugrpo_megatron.recipe.objective import ObjectiveSection


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Loss of each of T tokens, and what determined it; the sum of `loss` is the loss without entropy bonus."""

    loss: Tensor
    """[T]: weighted loss of each token; differentiable in the log-probabilities."""
    log_ratio: Tensor
    """[T], no gradient: log of current over behaviour probability."""
    clipped: Tensor
    """bool [T]"""
    keep: Tensor
    """bool [T]: neither vetoed nor masked."""
    first_trigger: Tensor
    """int64: the veto's state for the tokens that follow (`veto.Veto`)."""
    tokens: TokenBatch
    """What the surrogate saw of them."""


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    segments: Segments,
    config: ObjectiveSection,
    statistics: UpdateStatistics | None = None,
    proximal: Tensor | None = None,
    ref: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss and diagnostics of response tokens; the reference for every other path.

    Args:
        logprobs: [T], log-probabilities under the current policy at the sampling temperature.
        behaviour: [T], the same under the policy that the ratio is taken against.
        advantages: [N], one for each response.
        segments: the response of each token and its weight.
        statistics: of the whole update, where `config.needs_statistics` and these tokens are a part of it;
            by default computed from these tokens.
        proximal: [T], log-probabilities under the policy that `config.clip_centre` clips around; by default the
            current policy.
        ref: [T], log-probabilities under the policy that the KL penalty holds the current one near; None for no
            penalty.
        entropy: [T], nats, of the current policy's distribution at each token, differentiable where its gradient is
            wanted; needed where `config.entropy_coef` is not 0.

    Returns:
        loss: scalar, float32 or wider; differentiable in `logprobs` and `entropy`.
        metrics: `diagnostics.METRICS` by name, exact for these tokens, and the user's own.
    """
    if statistics is None:
        statistics = update_statistics(logprobs, behaviour, advantages, segments, config)
    start = initial_state(segments, config)
    losses = token_losses(logprobs, behaviour, advantages, segments, config, statistics, start, proximal, ref)
    loss = losses.loss.sum()
    if config.entropy_coef:
        if entropy is None:
            raise ValueError("objective.entropy_coef needs the entropy of every token's distribution")
        loss = loss + entropy_loss(entropy, segments, config).sum()
    metrics = diagnostics.metrics(
        loss=loss.detach(),
        logprobs=logprobs.detach(),
        log_ratio=losses.log_ratio,
        advantages=advantages,
        segments=segments,
        clipped=losses.clipped,
        keep=losses.keep,
        first_trigger=losses.first_trigger,
        config=config,
        ref=ref,
    )
    return loss, metrics | user_metrics(losses.tokens, config)


def token_losses(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    segments: Segments,
    config: ObjectiveSection,
    statistics: UpdateStatistics,
    first_trigger: Tensor,
    proximal: Tensor | None = None,
    ref: Tensor | None = None,
) -> TokenLosses:
    """Weighted loss of each token, of whole responses or of the next chunk of them in token order.

    The chunk may start and end inside a response unless `config.dependence` is `response`.
    """
    log_ratio = log_ratios(logprobs, behaviour)
    logprobs = logprobs.to(log_ratio.dtype)
    advantage = advantages.to(log_ratio.dtype)[segments.ids]
    ratio = importance_ratio(log_ratio, segments, config)
    low = (-statistics.log_clip).exp().to(logprobs.dtype).clamp(min=config.clip_low)
    high = statistics.log_clip.exp().to(logprobs.dtype).clamp(max=config.clip_high)
    if config.clip_centre != "one":
        low, high = recentre_clip(_proximal_ratio(ratio, proximal, behaviour, segments, config), low, high, config)
    sampled = behaviour.to(logprobs.dtype)
    own = token_advantage(advantage, logprobs, sampled, segments.teacher, config)
    tokens = TokenBatch(logprobs, sampled, log_ratio, ratio, own, low, high, segments)
    terms = surrogate_of(config)(tokens, config)
    verdict = keep_mask(log_ratio, advantage, segments, config, statistics.log_drop, first_trigger)
    weight = segments.weights.to(logprobs.dtype)[segments.ids]
    weight = weight if segments.correction is None else weight * segments.correction.to(weight.dtype)
    loss = torch.where(verdict.keep, terms.loss, 0.0) * weight
    if ref is not None and config.kl_coef and config.kl_penalty != "reward":
        loss = loss + kl_loss(logprobs, ref, log_ratio, segments, config)
    return TokenLosses(loss, log_ratio.detach(), terms.clipped, verdict.keep, verdict.first_trigger, tokens)


def token_advantage(
    advantage: Tensor, logprobs: Tensor, behaviour: Tensor, teacher: Tensor | None, config: ObjectiveSection
) -> Tensor:
    """A_t = A - `teacher_coef` (log pi - log teacher) of each token [T]; `advantage` [T] itself without a teacher.

    pi is the current policy or the one that sampled, as `teacher_policy` says; no gradient flows through it. Under the
    importance ratio, the mean gradient of -A_t log pi with the current policy is that of the reverse KL(pi | teacher)
    of a token given its prefix, at any staleness (on-policy distillation, arXiv 2306.13649; slime's `opd_kl_coef`).
    """
    if teacher is None or not config.teacher_coef:
        return advantage
    policy = logprobs.detach() if config.teacher_policy == "current" else behaviour
    return advantage - config.teacher_coef * (policy - teacher.to(policy.dtype))


def _proximal_ratio(
    ratio: Tensor, proximal: Tensor | None, behaviour: Tensor, segments: Segments, config: ObjectiveSection
) -> Tensor:
    """The proximal policy's importance ratio [T], at the level of the current policy's `ratio` and in its type."""
    if proximal is None:
        return ratio.detach()
    return importance_ratio(log_ratios(proximal.to(ratio.dtype), behaviour), segments, config)
