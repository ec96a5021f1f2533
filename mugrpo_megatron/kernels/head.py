"""One rank's shard of the output layer, a chunk of tokens at a time: log-probabilities forward, gradients backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mugrpo_megatron.algorithm.segments import slice_or_none
from mugrpo_megatron.kernels import torch_ops
from mugrpo_megatron.kernels.torch_ops import FLOOR, EntropyTerm

Backend = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Sharding of an output layer over ranks, and settings of its logits."""

    vocab_size: int
    """Number of tokens in the vocabulary; later rows of the weight are padding and are ignored."""
    temperature: float = 1.0
    """The temperature that logits are divided by."""
    tp_group: dist.ProcessGroup | None = None
    """Ranks that shard the vocabulary, with equally many rows each; None is one rank."""
    chunk: int = 1024
    """Number of tokens whose logits exist at once."""
    backend: Backend = "auto"
    """`auto` takes Triton on CUDA and PyTorch elsewhere."""


@dataclass(frozen=True, slots=True)
class Head:
    """One rank's output layer, with the buffer of logits for a pass over tokens."""

    weight: Tensor
    """[V / tp, H] as the GEMMs read it: `gemm_input` of the parameter."""
    first: int
    """Token id that the first row of this shard belongs to."""
    valid: int
    """Number of rows that are tokens; the rows after them are padding."""
    scale: float
    """Factor of the logits: the inverse temperature."""
    tp_group: dist.ProcessGroup | None
    """Ranks that shard the vocabulary; None stands for a single rank."""
    rows: ModuleType
    """The back end: `torch_ops` or `triton_ops`."""
    logits: Tensor
    """float32 [chunk, V / tp]: the only buffer of logits."""

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices that cover `tokens` tokens in order, each of at most as many tokens as `logits` has rows."""
        size = len(self.logits)
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def make_head(weight: Tensor, layout: HeadLayout, tokens: int) -> Head:
    """Make the head of this rank's `weight` [V / tp, H], with a buffer of logits for a pass over `tokens` tokens."""
    first = 0 if layout.tp_group is None else dist.get_rank(layout.tp_group) * len(weight)
    valid = max(0, min(len(weight), layout.vocab_size - first))
    size = max(1, min(layout.chunk, tokens))
    logits = torch.empty(size, len(weight), dtype=torch.float32, device=weight.device)
    rows: ModuleType = torch_ops
    if layout.backend == "triton" or (layout.backend == "auto" and weight.is_cuda):
        from mugrpo_megatron.kernels import triton_ops as rows  # not at the top: without CUDA Triton may be missing
    return Head(gemm_input(weight), first, valid, 1 / layout.temperature, layout.tp_group, rows, logits)


def scan(
    head: Head, hidden: Tensor, targets: Tensor, support_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probability, entropy (nats) and log-sum-exp of a chunk's tokens, each float32 [n], in 1 GEMM.

    With `support_ids`, each distribution is over these tokens only, as for `project`.

    The chunk's logits stay in `head.logits`. Ranks that shard the vocabulary all-gather 16 bytes a token. Every rank
    merges the same numbers in the same order, so the results are bitwise equal on all ranks.
    """
    logits = project(head, hidden, support_ids)
    ranks: Tensor = head.rows.statistics(logits, head.scale, head.valid, targets - head.first)[None]
    if head.tp_group is not None:
        local = ranks
        ranks = local.new_empty(dist.get_world_size(head.tp_group), *local.shape[1:])
        # Megatron does three all-reduces (tensor_parallel/cross_entropy.py). One gather takes less time, and lets all
        # ranks add in the same order.
        dist.all_gather_into_tensor(ranks, local, group=head.tp_group)
    tops, sums, means, target = ranks.unbind(1)
    top = tops.amax(0)
    factors = (tops - top).exp()
    total = (sums * factors).sum(0)
    lse = top + total.log()
    return target.sum(0) - lse, lse - (means * factors).sum(0) / total, lse


def head_backward(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    lse: Tensor,
    d_logprobs: Tensor,
    d_weight: Tensor | None,
    entropy: EntropyTerm | None = None,
) -> Tensor:
    """Compute the gradients of sum(d_logprobs * logprob) in `hidden` and in the weight, in 2 GEMMs.

    With `entropy`, sum(entropy.d_entropy * H) is added to the differentiated sum, where H is a token's entropy. The
    weight's gradient is added to `d_weight`; None skips it. Returns the gradient in `hidden`, [n, H], of this rank's
    part of the vocabulary: the caller sums it over `head.tp_group`. The logits that `scan` or `project` left in
    `head.logits` are overwritten.
    """
    logits = head.logits[: len(hidden)]
    d_logits: Tensor = head.rows.gradient(
        logits, head.scale, head.valid, targets - head.first, lse, d_logprobs, head.weight.dtype, entropy
    )
    if d_weight is not None:
        accumulate(d_weight, d_logits, gemm_input(hidden))
    return d_logits @ head.weight


def gemm_input(matrix: Tensor) -> Tensor:
    """Convert `matrix` to the type that the GEMMs read.

    On CUDA that is its own type: tensor cores accumulate bf16 products in float32 and can return float32. A CPU GEMM
    rounds its result to the type of its inputs, so on CPU the type is float32.
    """
    return matrix if matrix.is_cuda else matrix.float()


def project(head: Head, hidden: Tensor, support_ids: Tensor | None = None) -> Tensor:
    """Compute the raw logits of a chunk into `head.logits`, and return them: float32 [n, V / tp].

    With `support_ids` int64 [n, k], global token ids padded with -1, the logits of all other tokens are `FLOOR`:
    probability 0 and no gradient.
    """
    logits, hidden = head.logits[: len(hidden)], gemm_input(hidden)
    if hidden.dtype == torch.float32:
        torch.mm(hidden, head.weight.T, out=logits)
    else:
        torch.mm(hidden, head.weight.T, out_dtype=torch.float32, out=logits)
    if support_ids is not None:
        columns = support_ids - head.first
        local = (support_ids >= 0) & (columns >= 0) & (columns < head.valid)
        columns = columns.clamp(0, logits.shape[1] - 1)
        values = torch.where(local, logits.gather(1, columns), FLOOR)
        # Token ids of other ranks are clamped to a column of this rank, and may hit the column of a local id. They have
        # the value FLOOR, so the maximum keeps the local id's logit.
        logits.fill_(FLOOR).scatter_reduce_(1, columns, values, "amax")
    return logits


def accumulate(total: Tensor, d_output: Tensor, x: Tensor) -> None:
    """Add d_output [t, m]^T x [t, n] to the float32 `total` [m, n]; both inputs have the type of `gemm_input`."""
    if d_output.dtype == torch.float32:
        total.addmm_(d_output.T, x)
    else:
        torch.addmm(total, d_output.T, x, out_dtype=torch.float32, out=total)


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, layout: HeadLayout, support_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target, and the entropy of the distribution at its position.

    Any loss may be computed from the log-probabilities, which are differentiable in `hidden` and `weight`. Forward
    takes 1 GEMM; backward recomputes the logits and takes 3 more. `fused_policy_loss` takes 3 in all for most
    objectives.

    Args:
        hidden: [T, H], the same on every rank of `layout.tp_group` (gathered before, under sequence parallelism).
        weight: [V / tp, H], this rank's rows of the output weight.
        targets: int64 [T] global token ids below `layout.vocab_size`.
        support_ids: int64 [T, k] global token ids that each softmax runs over, -1 where fewer; None for the vocabulary.

    Returns:
        logprobs float32 [T]; entropy float32 [T] in nats, not differentiable.

    The gradient of `hidden` is only this rank's: the caller sums it over the group, as the backward of
    `copy_to_tensor_model_parallel_region` (all-reduce) or of
    `gather_from_sequence_parallel_region(tensor_parallel_output_grad=True)` (reduce-scatter) does.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, layout, support_ids)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, layout: HeadLayout, support_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        head = make_head(weight, layout, len(targets))
        logprobs, entropy, lse = torch.empty(3, len(targets), dtype=torch.float32, device=hidden.device)
        for rows in head.chunks(len(targets)):
            support = slice_or_none(support_ids, rows)
            logprobs[rows], entropy[rows], lse[rows] = scan(head, hidden[rows], targets[rows], support)
        ctx.layout = layout
        ctx.save_for_backward(hidden, weight, targets, lse, support_ids)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, support_ids = ctx.saved_tensors
        head = make_head(weight, ctx.layout, len(targets))
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in head.chunks(len(targets)):
            project(head, hidden[rows], slice_or_none(support_ids, rows))
            d_hidden[rows] = head_backward(head, hidden[rows], targets[rows], lse[rows], grads[0][rows], d_weight)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None
