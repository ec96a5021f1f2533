"""Computes loss and gradients of an objective directly from hidden states and the output weight.

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
from mugrpo_megatron.algorithm.segments import LossInputs, slice_or_none
from mugrpo_megatron.algorithm.statistics import UpdateStatistics, neutral_statistics
from mugrpo_megatron.algorithm.surrogates import entropy_loss
from mugrpo_megatron.algorithm.veto import VetoState, initial_state
from mugrpo_megatron.kernels.head import Head, HeadLayout, head_backward, make_head, project, scan
from mugrpo_megatron.kernels.torch_ops import EntropyTerm


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """A micro-batch's part of the update's loss."""

    loss: Tensor
    """float32 []; differentiable in hidden states and weight."""
    logprobs: Tensor
    """float32 [T]: log-probabilities of the targets; without a gradient."""
    entropy: Tensor
    """float32 [T]: entropy in nats of each token's distribution; without a gradient."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The inputs of output layer and loss for T tokens in token order; `fused_policy_loss` describes the fields."""

    hidden: Tensor
    targets: Tensor
    support_ids: Tensor | None
    inputs: LossInputs
    statistics: UpdateStatistics

    def chunk(self, rows: slice) -> _Batch:
        return _Batch(
            self.hidden[rows],
            self.targets[rows],
            slice_or_none(self.support_ids, rows),
            self.inputs.chunk(rows),
            self.statistics,
        )


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Buffers that receive the gradients, and the factor by which the gradients are multiplied."""

    hidden: Tensor
    """[T, H] in the type of the hidden states."""
    weight: Tensor | None
    """float32 [V / tp, H]: gradient of the output weight; None if the weight is not trained."""
    scale: float
    """Factor of both gradients: the loss scale, or 1 if autograd accumulates the weight's gradient."""


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inputs: LossInputs,
    layout: HeadLayout,
    *,
    support_ids: Tensor | None = None,
    statistics: UpdateStatistics | None = None,
    main_grad: Tensor | None = None,
    grad_scale: float = 1.0,
) -> FusedLoss:
    """Compute the loss of `algorithm.policy_loss.policy_loss` and its gradients, one chunk of tokens at a time.

    Args:
        hidden: [T, H] at the positions that predict the response tokens, the same on every rank of `layout.tp_group`
            (gathered before, under sequence and context parallelism).
        weight: [V / tp, H], this rank's rows of the output weight, tied or not.
        targets: int64 [T] global token ids.
        inputs: the loss's inputs for the micro-batch, T tokens of N whole responses.
        support_ids: int64 [T, k] global token ids that each softmax runs over, -1 where fewer; None for the vocabulary.
        statistics: those of the whole update, or None; needed if `config.needs_statistics`.
        main_grad: float32 [V / tp, H]; the weight's gradient, times `grad_scale`, is added to it in this call, and
            autograd gets none for the weight, so its hooks do not fire. None: autograd accumulates the gradient.
        grad_scale: with `main_grad`, the gradient of the loss that the backward pass will start from; backward fails
            if it gets another.

    With gradients disabled this is 1 GEMM. The gradient of `hidden` is this rank's part: the caller sums it over
    `layout.tp_group`, as `token_logprobs` describes.

    Raises:
        ValueError: statistics are missing.
    """
    config = inputs.config
    if statistics is None and config.needs_statistics:
        raise ValueError(
            f"objective {config.name} needs statistics of the whole update: pass `statistics`, made by "
            "`update_statistics` from the log-probabilities of all of its tokens"
        )
    learn = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    # Gradients are computed here, in the forward pass, so autograd must not record the GEMMs a second time.
    with torch.no_grad():
        head = make_head(weight, layout, len(targets))
        statistics = neutral_statistics(hidden.device) if statistics is None else statistics
        batch = _Batch(hidden, targets, support_ids, inputs, statistics)
        gradients = _buffers(hidden, weight, main_grad, grad_scale) if learn else None
        result = (_two_passes if config.dependence == "response" else _one_pass)(head, batch, gradients)
    if gradients is None:
        return result
    # With main_grad autograd gets no weight gradient: Megatron's DDP hook would add it a second time (learner.linear).
    d_weight, expected_grad = (gradients.weight, None) if main_grad is None else (None, grad_scale)
    return replace(
        result, loss=_PrecomputedGradients.apply(result.loss, hidden, weight, gradients.hidden, d_weight, expected_grad)
    )


def _one_pass(head: Head, batch: _Batch, gradients: _Gradients | None) -> FusedLoss:
    """Compute log-probabilities, losses and gradients of each chunk while its logits exist, in token order."""
    count, device = len(batch.targets), batch.hidden.device
    loss = torch.zeros((), dtype=torch.float32, device=device)
    logprobs, entropy = torch.empty(2, count, dtype=torch.float32, device=device)
    # Tokens of one chunk veto or weigh tokens of the next, so chunks go in token order and carry the veto's state.
    state = initial_state(batch.inputs.segments, batch.inputs.config)
    for rows in head.chunks(count):
        chunk = batch.chunk(rows)
        logprobs[rows], entropy[rows], lse = scan(head, chunk.hidden, chunk.targets, chunk.support_ids)
        losses, d_logprobs, state = _token_losses(chunk, logprobs[rows], state)
        entropy_bonus, entropy_term = _entropy_bonus(chunk, entropy[rows])
        loss += losses.sum() + entropy_bonus
        if gradients is not None:
            gradients.hidden[rows] = _gradient(head, chunk, lse, d_logprobs, entropy_term, gradients)
    return FusedLoss(loss, logprobs, entropy)


def _two_passes(head: Head, batch: _Batch, gradients: _Gradients | None) -> FusedLoss:
    """Compute all tokens' log-probabilities, then all losses, then, chunk by chunk, logits again and gradients."""
    count = len(batch.targets)
    logprobs, entropy, lse = torch.empty(3, count, dtype=torch.float32, device=batch.hidden.device)
    for rows in head.chunks(count):
        chunk = batch.chunk(rows)
        logprobs[rows], entropy[rows], lse[rows] = scan(head, chunk.hidden, chunk.targets, chunk.support_ids)
    state = initial_state(batch.inputs.segments, batch.inputs.config)
    losses, d_logprobs, _ = _token_losses(batch, logprobs, state)
    entropy_bonus, _ = _entropy_bonus(batch, entropy)
    if gradients is not None:
        for rows in head.chunks(count):
            chunk = batch.chunk(rows)
            # The logits are computed a second time, because keeping them, [T, V], would take 20 GB for 32k tokens and
            # a vocabulary of 152k.
            project(head, chunk.hidden, chunk.support_ids)
            _, entropy_term = _entropy_bonus(chunk, entropy[rows])
            gradients.hidden[rows] = _gradient(head, chunk, lse[rows], d_logprobs[rows], entropy_term, gradients)
    return FusedLoss(losses.sum() + entropy_bonus, logprobs, entropy)


def _token_losses(batch: _Batch, logprobs: Tensor, state: VetoState) -> tuple[Tensor, Tensor, VetoState]:
    """The loss of each token, its derivative in the token's log-probability, and the veto's state after the tokens."""
    # The derivative is autograd's, so that no surrogate has a second, hand-written gradient that could disagree.
    with torch.enable_grad():
        logprobs = logprobs.detach().requires_grad_()
        losses = token_losses(logprobs, batch.inputs, batch.statistics, state)
        (d_logprobs,) = torch.autograd.grad(losses.loss.sum(), logprobs)
    return losses.loss.detach(), d_logprobs, losses.mask.state


def _entropy_bonus(batch: _Batch, entropy: Tensor) -> tuple[Tensor, EntropyTerm | None]:
    """The entropy bonus as a loss, summed over the tokens, and what its gradient needs; 0 and None without a bonus."""
    if not batch.inputs.config.entropy_coef:
        return entropy.new_zeros(()), None
    with torch.enable_grad():
        leaf = entropy.detach().requires_grad_()
        loss = entropy_loss(leaf, batch.inputs.segments, batch.inputs.config).sum()
        (d_entropy,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), EntropyTerm(entropy, d_entropy)


def _gradient(
    head: Head,
    chunk: _Batch,
    lse: Tensor,
    d_logprobs: Tensor,
    entropy_term: EntropyTerm | None,
    gradients: _Gradients,
) -> Tensor:
    """Return the gradient of a chunk's hidden states, [n, H], and add the output weight's gradient to its buffer."""
    # float16's loss scale is applied before the GEMMs, as in an ordinary backward pass: without it the GEMMs would
    # round small gradients to 0, which a later multiplication could not undo.
    scale = gradients.scale
    entropy_term = entropy_term and replace(entropy_term, d_entropy=entropy_term.d_entropy * scale)
    return head_backward(head, chunk.hidden, chunk.targets, lse, d_logprobs * scale, gradients.weight, entropy_term)


def _buffers(hidden: Tensor, weight: Tensor, main_grad: Tensor | None, grad_scale: float) -> _Gradients:
    d_weight = None
    if weight.requires_grad:
        # The sum is float32, as Megatron's main_grad is (grad_reduce_in_fp32); in bf16 the small gradients of single
        # chunks would be lost.
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if main_grad is None else main_grad
    return _Gradients(torch.empty_like(hidden), d_weight, 1.0 if main_grad is None else grad_scale)


class _PrecomputedGradients(torch.autograd.Function):
    """Autograd function: returns the loss, and in backward the gradients that were computed before."""

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
        """`expected_grad`: the upstream gradient by which `d_hidden` is already multiplied; None if by none."""
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
        # Compared on the device: `if grad != expected` would make the host wait for every micro-batch.
        torch._assert_async(grad == ctx.expected_grad)
        return None, d_hidden, None, None, None, None
