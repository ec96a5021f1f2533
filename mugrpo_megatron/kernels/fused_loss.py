"""Loss and gradients of an objective directly from hidden states and the output weight.

The gradient of a token's loss in its log-probability depends on that log-probability, on numbers known before the
update and, through the veto, on earlier tokens of its response. So one pass over chunks in token order, which carries
the veto's state, computes loss and gradients while a chunk's logits exist: 3 GEMMs. An objective that depends on whole
responses needs the log-probabilities of all tokens first: 4 GEMMs. `ObjectiveSection.dependence` says which it is. The
backward pass only returns the gradients computed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.policy_loss import token_losses
from mugrpo_megatron.algorithm.segments import Segments
from mugrpo_megatron.algorithm.statistics import UpdateStatistics, neutral_statistics
from mugrpo_megatron.algorithm.surrogates import entropy_loss
from mugrpo_megatron.algorithm.veto import initial_state
from mugrpo_megatron.kernels.head import Head, HeadLayout, head_backward, make_head, of, project, scan
from mugrpo_megatron.kernels.torch_ops import EntropyTerm
from mugrpo_megatron.recipe.objective import ObjectiveSection


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """A micro-batch's part of the update's loss."""

    loss: Tensor
    """float32 []; differentiable in hidden states and weight."""
    logprobs: Tensor
    """float32 [T], no gradient."""
    entropy: Tensor
    """float32 [T], no gradient, nats."""


@dataclass(frozen=True, slots=True)
class _Objective:
    """Arguments of `token_losses` other than the log-probabilities, with tokens in the order of evaluation."""

    behaviour: Tensor
    advantages: Tensor
    segments: Segments
    config: ObjectiveSection
    statistics: UpdateStatistics
    reference: Tensor | None
    anchor: Tensor | None

    def part(self, tokens: slice) -> _Objective:
        return replace(
            self,
            behaviour=self.behaviour[tokens],
            segments=self.segments.part(tokens),
            reference=None if self.reference is None else self.reference[tokens],
            anchor=None if self.anchor is None else self.anchor[tokens],
        )


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Buffers that gradients are computed into."""

    hidden: Tensor
    """[T, H] in the type of the hidden states."""
    weight: Tensor | None
    """float32 [V / tp, H]; None for a weight that is not trained."""
    scale: float
    """Factor of all of them."""


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    segments: Segments,
    config: ObjectiveSection,
    layout: HeadLayout,
    *,
    kept: Tensor | None = None,
    statistics: UpdateStatistics | None = None,
    reference: Tensor | None = None,
    anchor: Tensor | None = None,
    main_grad: Tensor | None = None,
    grad_scale: float = 1.0,
) -> FusedLoss:
    """`algorithm.policy_loss.policy_loss` of `token_logprobs`, and its gradients, with one chunk of logits at a time.

    Args:
        hidden: [T, H] at the positions that predict the response tokens, the same on every rank of `layout.tp_group`
            (gathered before, under sequence and context parallelism).
        weight: [V / tp, H], this rank's rows of the output weight, tied or not.
        targets: int64 [T] global token ids.
        behaviour, advantages, segments, reference, anchor: as for `policy_loss`, of the micro-batch's T tokens of N
            whole responses.
        kept: int64 [T, k] global token ids that each softmax runs over, -1 where fewer; None for the vocabulary.
        statistics: of the whole update; needed where `config.needs_statistics`.
        main_grad: float32 [V / tp, H]; the weight's gradient, times `grad_scale`, is added to it in this call, and
            autograd gets none for the weight, so its hooks do not fire. None: autograd accumulates the gradient.
        grad_scale: with `main_grad`, the gradient that the backward pass will pass to the loss; a different one there
            is an error.

    Without gradients enabled this is 1 GEMM. The gradient of `hidden` is this rank's part, as for `token_logprobs`.

    Raises:
        ValueError: statistics are missing.
    """
    if statistics is None and config.needs_statistics:
        raise ValueError(f"objective {config.name} needs update_statistics of the whole update's log-probabilities")
    learn = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.no_grad():
        head = make_head(weight, layout, len(targets))
        statistics = neutral_statistics(hidden.device) if statistics is None else statistics
        objective = _Objective(behaviour, advantages, segments, config, statistics, reference, anchor)
        gradients = _buffers(hidden, weight, main_grad, grad_scale) if learn else None
        passes = _two_passes if config.dependence == "response" else _one_pass
        result = passes(head, hidden, targets, kept, objective, gradients)
    if gradients is None:
        return result
    formed, expected_grad = (gradients.weight, None) if main_grad is None else (None, grad_scale)
    return replace(
        result, loss=_PrecomputedGradients.apply(result.loss, hidden, weight, gradients.hidden, formed, expected_grad)
    )


def _one_pass(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    kept: Tensor | None,
    objective: _Objective,
    gradients: _Gradients | None,
) -> FusedLoss:
    """Log-probabilities, losses and gradients of a chunk while its logits exist, then of the next."""
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    logprobs, entropy = torch.empty(2, len(targets), dtype=torch.float32, device=hidden.device)
    triggers = initial_state(objective.segments, objective.config)
    for part in head.chunks(len(targets)):
        logprobs[part], entropy[part], lse = scan(head, hidden[part], targets[part], of(kept, part))
        value, slope, triggers = _loss_and_slope(objective.part(part), logprobs[part], triggers)
        bonus, pull = _bonus(objective.part(part), entropy[part])
        loss += value.sum() + bonus
        if gradients is not None:
            _chunk_gradients(head, hidden, targets, lse, slope, part, gradients, pull)
    return FusedLoss(loss, logprobs, entropy)


def _two_passes(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    kept: Tensor | None,
    objective: _Objective,
    gradients: _Gradients | None,
) -> FusedLoss:
    """Log-probabilities of all tokens, then their losses, then each chunk's logits a second time for the gradient."""
    logprobs, entropy, lse = torch.empty(3, len(targets), dtype=torch.float32, device=hidden.device)
    for part in head.chunks(len(targets)):
        logprobs[part], entropy[part], lse[part] = scan(head, hidden[part], targets[part], of(kept, part))
    value, slope, _ = _loss_and_slope(objective, logprobs, initial_state(objective.segments, objective.config))
    bonus, _ = _bonus(objective, entropy)
    if gradients is not None:
        for part in head.chunks(len(targets)):
            project(head, hidden[part], of(kept, part))
            _, pull = _bonus(objective.part(part), entropy[part])
            _chunk_gradients(head, hidden, targets, lse[part], slope[part], part, gradients, pull)
    return FusedLoss(value.sum() + bonus, logprobs, entropy)


def _loss_and_slope(objective: _Objective, logprobs: Tensor, triggers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each token, its derivative in the log-probabilities (autograd of the reference), and the veto's state."""
    with torch.enable_grad():
        logprobs = logprobs.detach().requires_grad_()
        losses = token_losses(
            logprobs,
            objective.behaviour,
            objective.advantages,
            objective.segments,
            objective.config,
            objective.statistics,
            triggers,
            objective.reference,
            objective.anchor,
        )
        (slope,) = torch.autograd.grad(losses.loss.sum(), logprobs)
    return losses.loss.detach(), slope, losses.first_trigger


def _bonus(objective: _Objective, entropy: Tensor) -> tuple[Tensor, EntropyTerm | None]:
    """The entropy bonus of some tokens, and what its gradient needs; None without a bonus."""
    if not objective.config.entropy_coef:
        return entropy.new_zeros(()), None
    with torch.enable_grad():
        leaf = entropy.detach().requires_grad_()
        loss = entropy_loss(leaf, objective.segments, objective.config).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), EntropyTerm(entropy, slope)


def _chunk_gradients(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    lse: Tensor,
    slope: Tensor,
    part: slice,
    gradients: _Gradients,
    pull: EntropyTerm | None,
) -> None:
    slope = slope * gradients.scale
    pull = pull and replace(pull, coefficient=pull.coefficient * gradients.scale)
    gradients.hidden[part] = head_backward(head, hidden[part], targets[part], lse, slope, gradients.weight, pull)


def _buffers(hidden: Tensor, weight: Tensor, main_grad: Tensor | None, grad_scale: float) -> _Gradients:
    d_weight = None
    if weight.requires_grad:
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if main_grad is None else main_grad
    return _Gradients(torch.empty_like(hidden), d_weight, 1.0 if main_grad is None else grad_scale)


class _PrecomputedGradients(torch.autograd.Function):
    """The loss, with gradients that are already computed."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        hidden: Tensor,
        weight: Tensor,
        d_hidden: Tensor,
        d_weight: Tensor | None,
        expected_grad: float | None,
    ) -> Tensor:
        """`expected_grad`: the gradient of the loss that is already in the gradients; None: it is 1."""
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.expected_grad, ctx.weight_dtype = expected_grad, weight.dtype
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        if ctx.expected_grad is None:
            weight_grad = None
            if ctx.needs_input_grad[2]:
                weight_grad = torch.mul(d_weight, grad, out=torch.empty_like(d_weight, dtype=ctx.weight_dtype))
            return None, d_hidden * grad, weight_grad, None, None, None
        torch._assert_async(grad == ctx.expected_grad)  # checked without waiting for the device
        return None, d_hidden, None, None, None, None
