"""The functions of `torch_ops` as Triton kernels: one program for each row of logits.

`statistics` reads every logit once (running maximum and sums); `gradient` reads it once more and writes the gradient
over it in the type that the GEMMs after it read, so no second buffer of a chunk's size exists.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel's parameters get their types when it is compiled for a call.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mugrpo_megatron.kernels.torch_ops import FLOOR, EntropyTerm

BLOCK = 4096
WARPS = 8


def statistics(logits: Tensor, scale: float, valid: int, targets: Tensor) -> Tensor:
    """As `torch_ops.statistics`."""
    out = torch.empty(4, len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _statistics[(len(logits),)](
            logits,
            logits.stride(0),
            targets.contiguous(),
            out,
            len(logits),
            valid,
            scale,
            FLOOR,
            BLOCK,
            num_warps=WARPS,
        )
    return out


def gradient(
    logits: Tensor,
    scale: float,
    valid: int,
    targets: Tensor,
    lse: Tensor,
    coefficient: Tensor,
    dtype: torch.dtype,
    entropy: EntropyTerm | None = None,
) -> Tensor:
    """As `torch_ops.gradient`; the result is a view of `logits`' memory with the same row stride in bytes."""
    columns = logits.shape[1]
    out = logits.view(dtype)[:, :columns]
    value, pull = (lse, lse) if entropy is None else (entropy.value, entropy.coefficient)
    if len(logits):
        _gradient[(len(logits),)](
            logits,
            logits.stride(0),
            out,
            out.stride(0),
            targets.contiguous(),
            lse.contiguous(),
            coefficient.contiguous(),
            value.contiguous(),
            pull.contiguous(),
            columns,
            valid,
            scale,
            entropy is not None,
            BLOCK,
            num_warps=WARPS,
        )
    return out


@triton.jit
def _statistics(logits, stride, targets, out, n, valid, scale, floor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    top = floor
    total = 0.0
    mean = 0.0
    for start in range(0, valid, BLOCK):
        inside = start + lanes < valid
        score = tl.load(base + start + lanes, mask=inside, other=0.0) * scale
        new = tl.maximum(top, tl.max(tl.where(inside, score, floor), 0))
        weight = tl.where(inside, tl.exp(score - new), 0.0)
        shrink = tl.exp(top - new)
        total = total * shrink + tl.sum(weight, 0)
        mean = mean * shrink + tl.sum(weight * score, 0)
        top = new
    target = tl.load(targets + row)
    mine = (target >= 0) & (target < valid)
    tl.store(out + row, top)
    tl.store(out + n + row, total)
    tl.store(out + 2 * n + row, mean)
    tl.store(out + 3 * n + row, tl.load(base + target, mask=mine, other=0.0) * scale)


@triton.jit
def _gradient(
    logits,
    stride,
    out,
    out_stride,
    targets,
    lse,
    coefficient,
    entropy,
    pull,
    columns,
    valid,
    scale,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    normaliser = tl.load(lse + row)
    slope = tl.load(coefficient + row) * scale
    target = tl.load(targets + row)
    mine = (target >= 0) & (target < valid)
    height = tl.load(entropy + row) if ENTROPY else 0.0
    upward = tl.load(pull + row) * scale if ENTROPY else 0.0
    for start in range(0, columns, BLOCK):
        column = start + lanes
        score = tl.load(logits + row * stride + column, mask=column < valid, other=0.0) * scale
        share = tl.where(column < valid, tl.exp(score - normaliser), 0.0)
        onehot = tl.where(mine & (column == target), 1.0, 0.0)
        if out.dtype.element_ty != logits.dtype.element_ty:
            # A narrower result overwrites logits of this block and earlier ones, also those of other threads, so all
            # threads must have read them. Without a barrier a warp may lag by a block or more.
            tl.debug_barrier()
        grad = slope * (onehot - share)
        if ENTROPY:
            grad -= upward * share * (score - normaliser + height)
        tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=column < columns)
