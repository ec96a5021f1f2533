"""One rank's part of the output layer, a chunk of tokens at a time: log-probabilities forward, gradients backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mugrpo_megatron.kernels import torch_ops
from mugrpo_megatron.kernels.torch_ops import FLOOR, EntropyTerm

Backend = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How an output layer is sharded over ranks, and how its logits are computed."""

    vocab_size: int
    """Tokens of the vocabulary; rows of the weight beyond it are padding and are ignored."""
    temperature: float = 1.0
    """Logits are divided by it."""
    tp_group: dist.ProcessGroup | None = None
    """Ranks that shard the vocabulary, with equally many rows each; None is one rank."""
    chunk: int = 1024
    """Tokens whose logits exist at once."""
    backend: Backend = "auto"
    """`auto` takes Triton on CUDA and PyTorch elsewhere."""


@dataclass(frozen=True, slots=True)
class Head:
    """One rank's output layer, with buffers for a pass over tokens."""

    weight: Tensor
    """[V / tp, H] as the GEMMs read it: `gemm_input` of the parameter."""
    first: int
    """Token id of the first row."""
    valid: int
    """Rows that are tokens; the others are padding."""
    scale: float
    """Inverse temperature."""
    tp_group: dist.ProcessGroup | None
    """Ranks that shard the vocabulary; None is one."""
    rows: ModuleType
    """The back end: `torch_ops` or `triton_ops`."""
    logits: Tensor
    """float32 [chunk, V / tp]: the only buffer of logits."""

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices of at most a chunk that cover `tokens` tokens in order."""
        size = len(self.logits)
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def make_head(weight: Tensor, layout: HeadLayout, tokens: int) -> Head:
    """The head of `weight` [V / tp, H] for a pass over `tokens` tokens."""
    first = 0 if layout.tp_group is None else dist.get_rank(layout.tp_group) * len(weight)
    valid = max(0, min(len(weight), layout.vocab_size - first))
    size = max(1, min(layout.chunk, tokens))
    logits = torch.empty(size, len(weight), dtype=torch.float32, device=weight.device)
    rows: ModuleType = torch_ops
    if layout.backend == "triton" or (layout.backend == "auto" and weight.is_cuda):
        from mugrpo_megatron.kernels import triton_ops as rows  # Triton may be missing without CUDA
    return Head(gemm_input(weight), first, valid, 1 / layout.temperature, layout.tp_group, rows, logits)


def of(support_ids: Tensor | None, part: slice) -> Tensor | None:
    """The support ids of a chunk."""
    return None if support_ids is None else support_ids[part]


def scan(
    head: Head, hidden: Tensor, targets: Tensor, support_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy (nats) and log-sum-exp of a chunk's tokens, each float32 [n]; 1 GEMM.

    With `support_ids`, of distributions over these tokens alone, as for `project`.

    Leaves the chunk's logits in `head.logits`. Under vocabulary parallelism one all-gather of 16 bytes a token; every
    rank merges the same numbers in the same order, so the results are bitwise equal.
    """
    logits = project(head, hidden, support_ids)
    every: Tensor = head.rows.statistics(logits, head.scale, head.valid, targets - head.first)[None]
    if head.tp_group is not None:
        local = every
        every = local.new_empty(dist.get_world_size(head.tp_group), *local.shape[1:])
        dist.all_gather_into_tensor(every, local, group=head.tp_group)
    tops, sums, means, target = every.unbind(1)
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
    coefficient: Tensor,
    d_weight: Tensor | None,
    entropy: EntropyTerm | None = None,
) -> Tensor:
    """Gradient of sum(coefficient * logprob) in `hidden`, [n, H]; that in the weight is added to `d_weight`; 2 GEMMs.

    With `entropy`, of sum(coefficient * logprob) + sum(entropy.coefficient * H).

    Overwrites the logits that `scan` or `project` left in `head.logits`. The result is this rank's part: the sum over
    `head.tp_group` is the gradient.
    """
    logits = head.logits[: len(hidden)]
    slope: Tensor = head.rows.gradient(
        logits, head.scale, head.valid, targets - head.first, lse, coefficient, head.weight.dtype, entropy
    )
    if d_weight is not None:
        accumulate(d_weight, slope, gemm_input(hidden))
    return slope @ head.weight


def gemm_input(matrix: Tensor) -> Tensor:
    """`matrix` in the type that the GEMMs read.

    On CUDA its own type: tensor cores accumulate bf16 products in float32 and can return float32. A CPU GEMM rounds its
    result to the type of its inputs, so there they are float32.
    """
    return matrix if matrix.is_cuda else matrix.float()


def project(head: Head, hidden: Tensor, support_ids: Tensor | None = None) -> Tensor:
    """Raw logits of a chunk in `head.logits`, float32 [n, V / tp].

    With `support_ids` int64 [n, k], global token ids and -1 where there are fewer, all other tokens' logits are
    `FLOOR`, so that they have probability 0 and no gradient.
    """
    logits, hidden = head.logits[: len(hidden)], gemm_input(hidden)
    if hidden.dtype == torch.float32:
        torch.mm(hidden, head.weight.T, out=logits)
    else:
        torch.mm(hidden, head.weight.T, out_dtype=torch.float32, out=logits)
    if support_ids is not None:
        columns = support_ids - head.first
        mine = (support_ids >= 0) & (columns >= 0) & (columns < head.valid)
        columns = columns.clamp(0, logits.shape[1] - 1)
        values = torch.where(mine, logits.gather(1, columns), FLOOR)
        logits.fill_(FLOOR).scatter_reduce_(1, columns, values, "amax")  # places of other ranks' tokens may coincide
    return logits


def accumulate(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """total [m, n] += slope [t, m]^T hidden [t, n], in float32; both inputs of one type, as from `gemm_input`."""
    if slope.dtype == torch.float32:
        total.addmm_(slope.T, hidden)
    else:
        torch.addmm(total, slope.T, hidden, out_dtype=torch.float32, out=total)


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, layout: HeadLayout, support_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution; differentiable in `hidden` and `weight`.

    For any function of the log-probabilities: 1 GEMM forward; backward recomputes the logits, 4 GEMMs in total. Losses
    of `algorithm` use `fused_loss`, which mostly needs 3.

    Args:
        hidden: [T, H], the same on every rank of `layout.tp_group` (gathered before, under sequence parallelism).
        weight: [V / tp, H], this rank's rows of the output weight.
        targets: int64 [T] global token ids below `layout.vocab_size`.
        support_ids: int64 [T, k] global token ids that each softmax runs over, -1 where fewer; None for the vocabulary.

    Returns:
        logprobs float32 [T]; entropy float32 [T] in nats, not differentiable.

    The gradient of `hidden` is this rank's PART: the caller sums it over the group, as the backward of
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
        for part in head.chunks(len(targets)):
            logprobs[part], entropy[part], lse[part] = scan(head, hidden[part], targets[part], of(support_ids, part))
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
        for part in head.chunks(len(targets)):
            project(head, hidden[part], of(support_ids, part))
            d_hidden[part] = head_backward(head, hidden[part], targets[part], lse[part], grads[0][part], d_weight)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None
