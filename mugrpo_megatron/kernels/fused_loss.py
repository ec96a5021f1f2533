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
class _LossInputs:
    """Tokens in the order of evaluation, with what the loss needs of them; fields as in `fused_policy_loss`."""

    hidden: Tensor
    targets: Tensor
    support_ids: Tensor | None
    behaviour: Tensor
    advantages: Tensor
    segments: Segments
    config: ObjectiveSection
    statistics: UpdateStatistics
    proximal: Tensor | None
    ref: Tensor | None

    def part(self, tokens: slice) -> _LossInputs:
        return replace(
            self,
            hidden=self.hidden[tokens],
            targets=self.targets[tokens],
            support_ids=of(self.support_ids, tokens),
            behaviour=self.behaviour[tokens],
            segments=self.segments.part(tokens),
            proximal=of(self.proximal, tokens),
            ref=of(self.ref, tokens),
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
    support_ids: Tensor | None = None,
    statistics: UpdateStatistics | None = None,
    proximal: Tensor | None = None,
    ref: Tensor | None = None,
    main_grad: Tensor | None = None,
    grad_scale: float = 1.0,
) -> FusedLoss:
    """`algorithm.policy_loss.policy_loss` of `token_logprobs`, and its gradients, with one chunk of logits at a time.

    Args:
        hidden: [T, H] at the positions that predict the response tokens, the same on every rank of `layout.tp_group`
            (gathered before, under sequence and context parallelism).
        weight: [V / tp, H], this rank's rows of the output weight, tied or not.
        targets: int64 [T] global token ids.
        behaviour, advantages, segments, proximal, ref: as for `policy_loss`, of the micro-batch's T tokens of N
            whole responses.
        support_ids: int64 [T, k] global token ids that each softmax runs over, -1 where fewer; None for the vocabulary.
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
        tokens = _LossInputs(
            hidden, targets, support_ids, behaviour, advantages, segments, config, statistics, proximal, ref
        )
        gradients = _buffers(hidden, weight, main_grad, grad_scale) if learn else None
        result = (_two_passes if config.dependence == "response" else _one_pass)(head, tokens, gradients)
    if gradients is None:
        return result
    formed, expected_grad = (gradients.weight, None) if main_grad is None else (None, grad_scale)
    return replace(
        result, loss=_PrecomputedGradients.apply(result.loss, hidden, weight, gradients.hidden, formed, expected_grad)
    )


def _one_pass(head: Head, tokens: _LossInputs, gradients: _Gradients | None) -> FusedLoss:
    """Log-probabilities, losses and gradients of a chunk while its logits exist, then of the next."""
    count, device = len(tokens.targets), tokens.hidden.device
    loss = torch.zeros((), dtype=torch.float32, device=device)
    logprobs, entropy = torch.empty(2, count, dtype=torch.float32, device=device)
    triggers = initial_state(tokens.segments, tokens.config)
    for part in head.chunks(count):
        chunk = tokens.part(part)
        logprobs[part], entropy[part], lse = scan(head, chunk.hidden, chunk.targets, chunk.support_ids)
        value, slope, triggers = _loss_and_slope(chunk, logprobs[part], triggers)
        bonus, pull = _bonus(chunk, entropy[part])
        loss += value.sum() + bonus
        if gradients is not None:
            gradients.hidden[part] = _gradient(head, chunk, lse, slope, pull, gradients)
    return FusedLoss(loss, logprobs, entropy)


def _two_passes(head: Head, tokens: _LossInputs, gradients: _Gradients | None) -> FusedLoss:
    """Log-probabilities of all tokens, then their losses, then each chunk's logits a second time for the gradient."""
    count = len(tokens.targets)
    logprobs, entropy, lse = torch.empty(3, count, dtype=torch.float32, device=tokens.hidden.device)
    for part in head.chunks(count):
        chunk = tokens.part(part)
        logprobs[part], entropy[part], lse[part] = scan(head, chunk.hidden, chunk.targets, chunk.support_ids)
    value, slope, _ = _loss_and_slope(tokens, logprobs, initial_state(tokens.segments, tokens.config))
    bonus, _ = _bonus(tokens, entropy)
    if gradients is not None:
        for part in head.chunks(count):
            chunk = tokens.part(part)
            project(head, chunk.hidden, chunk.support_ids)
            _, pull = _bonus(chunk, entropy[part])
            gradients.hidden[part] = _gradient(head, chunk, lse[part], slope[part], pull, gradients)
    return FusedLoss(value.sum() + bonus, logprobs, entropy)


def _loss_and_slope(tokens: _LossInputs, logprobs: Tensor, triggers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each token, its derivative in the log-probabilities (autograd of the reference), and the veto's state."""
    with torch.enable_grad():
        logprobs = logprobs.detach().requires_grad_()
        losses = token_losses(
            logprobs,
            tokens.behaviour,
            tokens.advantages,
            tokens.segments,
            tokens.config,
            tokens.statistics,
            triggers,
            tokens.proximal,
            tokens.ref,
        )
        (slope,) = torch.autograd.grad(losses.loss.sum(), logprobs)
    return losses.loss.detach(), slope, losses.first_trigger


def _bonus(tokens: _LossInputs, entropy: Tensor) -> tuple[Tensor, EntropyTerm | None]:
    """The entropy bonus of some tokens, and what its gradient needs; None without a bonus."""
    if not tokens.config.entropy_coef:
        return entropy.new_zeros(()), None
    with torch.enable_grad():
        leaf = entropy.detach().requires_grad_()
        loss = entropy_loss(leaf, tokens.segments, tokens.config).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), EntropyTerm(entropy, slope)


def _gradient(
    head: Head, chunk: _LossInputs, lse: Tensor, slope: Tensor, pull: EntropyTerm | None, gradients: _Gradients
) -> Tensor:
    """The gradient in a chunk's hidden states; that in the weight is added to its buffer."""
    pull = pull and replace(pull, coefficient=pull.coefficient * gradients.scale)
    return head_backward(head, chunk.hidden, chunk.targets, lse, slope * gradients.scale, gradients.weight, pull)


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
