"""The loss of an update: token losses x veto x weights, KL penalty, entropy bonus. One signature for all objectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mugrpo_megatron.algorithm import diagnostics
from mugrpo_megatron.algorithm.masks import keep_mask
from mugrpo_megatron.algorithm.ref_kl import kl_loss
from mugrpo_megatron.algorithm.segments import LossInputs
from mugrpo_megatron.algorithm.statistics import UpdateStatistics, update_statistics
from mugrpo_megatron.algorithm.surrogates import (
    TokenBatch,
    entropy_loss,
    importance_ratio,
    log_ratios,
    recentre_clip,
    surrogate_of,
)
from mugrpo_megatron.algorithm.veto import KeepMask, VetoState, initial_state
from mugrpo_megatron.recipe.objective import ObjectiveSection


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The loss of each of T tokens without the entropy bonus, and what the loss was computed from."""

    loss: Tensor
    """[T]: weighted loss of each token; differentiable in the log-probabilities."""
    tokens: TokenBatch
    """The tokens as the surrogate got them."""
    clipped: Tensor
    """bool [T]: whether the clip acts on a token, as in `SurrogateLoss`."""
    mask: KeepMask
    """Tokens that are neither vetoed nor masked, and the veto's state for the tokens that follow."""


def policy_loss(
    logprobs: Tensor, inputs: LossInputs, statistics: UpdateStatistics | None = None, entropy: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Loss and diagnostics of T response tokens; the reference implementation that every other path is tested against.

    Args:
        logprobs: [T], log-probabilities under the current policy at the sampling temperature.
        statistics: of the whole update, if `config.needs_statistics` and these tokens are only some of it; by default
            computed from these tokens.
        entropy: [T], nats, of the current policy's distribution at each token; ValueError if it is missing and
            `config.entropy_coef` is not 0.

    Returns:
        loss: scalar, float32 or wider; differentiable in `logprobs` and `entropy`.
        metrics: `diagnostics.METRICS` by name, exact for these tokens, and the user's.
    """
    config = inputs.config
    if statistics is None:
        statistics = update_statistics(logprobs, inputs)
    losses = token_losses(logprobs, inputs, statistics, initial_state(inputs.segments, config))
    loss = losses.loss.sum()
    if config.entropy_coef:
        if entropy is None:
            raise ValueError("objective.entropy_coef needs the entropy of every token's distribution: pass `entropy`")
        # The bonus is outside `token_losses`: its gradient goes through H, not through the sampled token's logprob.
        loss = loss + entropy_loss(entropy, inputs.segments, config).sum()
    tokens = losses.tokens.detached()
    metrics = diagnostics.metrics(loss.detach(), tokens, losses.clipped, losses.mask, inputs)
    return loss, metrics | diagnostics.user_metrics(tokens, config)


def token_losses(logprobs: Tensor, inputs: LossInputs, statistics: UpdateStatistics, state: VetoState) -> TokenLosses:
    """Compute the weighted loss of each token of whole responses, or of the next chunk of their tokens.

    Chunks come in token order, and may start and end inside a response unless `config.dependence` is `response`.
    `state` is the veto's state after the tokens before the chunk.
    """
    config, segments = inputs.config, inputs.segments
    log_ratio = log_ratios(logprobs, inputs.behaviour)
    dtype = log_ratio.dtype
    logprobs, behaviour = logprobs.to(dtype), inputs.behaviour.to(dtype)
    advantage = inputs.advantages.to(dtype)[segments.ids]
    ratio = importance_ratio(log_ratio, segments, config)
    # M2PO (arXiv 2510.01161) may only narrow the recipe's clip range, so its bound is clamped into the range.
    low = (-statistics.log_clip).exp().to(dtype).clamp(min=config.clip_low)
    high = statistics.log_clip.exp().to(dtype).clamp(max=config.clip_high)
    if config.clip_centre != "one":
        low, high = recentre_clip(_proximal_ratio(ratio, inputs), low, high, config)
    # The veto reads the response's advantage and the surrogate the token's, because a teacher may change the sign of a
    # token's advantage.
    advantage_t = token_advantage(advantage, logprobs, behaviour, inputs.teacher, config)
    tokens = TokenBatch(logprobs, behaviour, log_ratio, ratio, advantage_t, low, high, segments)
    surrogate = surrogate_of(config)(tokens, config)
    mask = keep_mask(log_ratio, advantage, segments, config, statistics.log_drop, state)
    # Denominators count vetoed tokens too, so that a veto does not raise the weights of the remaining tokens. That is
    # our reading: the paper does not say (docs/algorithm.md).
    weight = segments.weights.to(dtype)[segments.ids]
    weight = weight if inputs.correction is None else weight * inputs.correction.to(dtype)
    weight = weight if mask.weight is None else weight * mask.weight
    # The loss is not multiplied by the mask, because a user's surrogate may be infinite at a vetoed token, and 0 * inf
    # is nan.
    loss = torch.where(mask.keep, surrogate.loss, 0.0) * weight
    # The mask does not apply to the KL penalty: behind a trigger the policy is far from the one that sampled, and there
    # the penalty is needed most.
    if inputs.ref is not None and config.kl_coef and config.kl_penalty != "reward":
        loss = loss + kl_loss(logprobs, inputs.ref, log_ratio, segments, config)
    return TokenLosses(loss, tokens, surrogate.clipped, mask)


def token_advantage(
    advantage: Tensor, logprobs: Tensor, behaviour: Tensor, teacher: Tensor | None, config: ObjectiveSection
) -> Tensor:
    """The advantage of each token [T]: A - `teacher_coef` (log pi - log teacher), where A is `advantage` [T].

    Without a teacher it is A. pi is the current policy if `teacher_policy` is "current", else the behaviour policy.
    If pi is the current policy and the importance ratio weighs the loss -A_t log pi, then the mean gradient of the
    teacher's part is `teacher_coef` times the gradient of the reverse KL(pi | teacher) of a token given its prefix, at
    any staleness (on-policy distillation, arXiv 2306.13649; slime's `opd_kl_coef`).
    """
    if teacher is None or not config.teacher_coef:
        return advantage
    # The log-probabilities are detached, because an advantage only scales the gradient and has none of its own.
    policy = logprobs.detach() if config.teacher_policy == "current" else behaviour
    return advantage - config.teacher_coef * (policy - teacher.to(policy.dtype))


def _proximal_ratio(ratio: Tensor, inputs: LossInputs) -> Tensor:
    """The ratio [T] of the proximal to the behaviour policy, at the level that `objective.ratio` names; no gradient."""
    if inputs.proximal is None:
        # With proximal_every = 1 the proximal policy is the current one, so the clip range is centred at the current
        # ratio.
        return ratio.detach()
    log_ratio = log_ratios(inputs.proximal.to(ratio.dtype), inputs.behaviour)
    return importance_ratio(log_ratio, inputs.segments, inputs.config)
