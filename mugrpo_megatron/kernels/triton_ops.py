"""This project's Triton kernels: the functions of `torch_ops`, and SwiGLU and the rotary embedding of the layers.

One program handles a row of logits: `statistics` reads every logit once (running maximum and sums); `gradient` reads it
once more and writes the gradient over it in the type that the following GEMMs read, so no second buffer of a chunk's
size exists.

The kernels of the layers, forward and backward, read their inputs once, compute in float32 and round once. SwiGLU has
one program per row, and is compiled once for a width, whatever the number of rows; a program of the rotation takes one
token and a block of its heads, which share the token's angles.
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
    """Softmax statistics of logits; arguments and result as in `torch_ops.statistics`."""
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
    d_logprobs: Tensor,
    dtype: torch.dtype,
    entropy: EntropyTerm | None = None,
) -> Tensor:
    """Gradient in the raw logits; arguments and result as in `torch_ops.gradient`. The result is a view of the memory
    of `logits` with the same row stride in bytes."""
    columns = logits.shape[1]
    out = logits.view(dtype)[:, :columns]
    value, d_entropy = (lse, lse) if entropy is None else (entropy.value, entropy.d_entropy)
    if len(logits):
        _gradient[(len(logits),)](
            logits,
            logits.stride(0),
            out,
            out.stride(0),
            targets.contiguous(),
            lse.contiguous(),
            d_logprobs.contiguous(),
            value.contiguous(),
            d_entropy.contiguous(),
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
    local = (target >= 0) & (target < valid)
    tl.store(out + row, top)
    tl.store(out + n + row, total)
    tl.store(out + 2 * n + row, mean)
    tl.store(out + 3 * n + row, tl.load(base + target, mask=local, other=0.0) * scale)


@triton.jit
def _gradient(
    logits,
    stride,
    out,
    out_stride,
    targets,
    lse,
    d_logprobs,
    entropy,
    d_entropy,
    columns,
    valid,
    scale,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    normaliser = tl.load(lse + row)
    factor = tl.load(d_logprobs + row) * scale
    target = tl.load(targets + row)
    local = (target >= 0) & (target < valid)
    value = tl.load(entropy + row) if ENTROPY else 0.0
    entropy_factor = tl.load(d_entropy + row) * scale if ENTROPY else 0.0
    for start in range(0, columns, BLOCK):
        column = start + lanes
        score = tl.load(logits + row * stride + column, mask=column < valid, other=0.0) * scale
        probability = tl.where(column < valid, tl.exp(score - normaliser), 0.0)
        onehot = tl.where(local & (column == target), 1.0, 0.0)
        if out.dtype.element_ty != logits.dtype.element_ty:
            # A narrower result overwrites logits of this block and of earlier ones, which other threads may still have
            # to read: without a barrier a warp may lag by a block or more.
            tl.debug_barrier()
        grad = factor * (onehot - probability)
        if ENTROPY:
            grad -= entropy_factor * probability * (score - normaliser + value)
        tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=column < columns)


LAYER_BLOCK = 1024
"""Values of a row that a program of SwiGLU takes at a time."""
LAYER_WARPS = 4
"""Warps of such a program: each thread then has 8 values, so that a load or store of 2-byte values takes 16 bytes."""


def swiglu(x: Tensor) -> Tensor:
    """x [..., 2 f] = [gate, up] -> silu(gate) * up [..., f] in the type of x, rounded once."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    if out.numel():
        width = out.shape[-1]
        _swiglu[(out.numel() // width,)](x, out, width, LAYER_BLOCK, num_warps=LAYER_WARPS)
    return out


def swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of `swiglu` in x [..., 2 f], from `grad` [..., f] in its result."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if grad.numel():
        width = grad.shape[-1]
        _swiglu_gradient[(grad.numel() // width,)](grad, x, dx, width, LAYER_BLOCK, num_warps=LAYER_WARPS)
    return dx


@triton.jit
def _swiglu(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
        tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_gradient(grad, x, dx, width, BLOCK: tl.constexpr):
    """Kernel of `swiglu_gradient`. With s = sigmoid(gate): d_gate = dy up s (1 + gate (1 - s)), d_up = dy gate s."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        here = row * 2 * width + column
        dy = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + here + width, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        d_gate = dy * up * s * (1.0 + gate * (1.0 - s))
        d_up = dy * gate * s
        tl.store(dx + here, d_gate.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + here + width, d_up.to(dx.dtype.element_ty), mask=inside)


VALUES = 2048
"""One program of `_rotate` takes at most this many values of the first halves of its heads, and as many of the second
halves; at least one head, however large."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate x [t, heads, d] as `learner.operators.rotate_` does, but into new memory, in the type of x, rounded once.

    cos, sin: [t, 1, d / 2] in any type. `inverse` rotates back, which is also the gradient.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        half = triton.next_power_of_2(size // 2)
        block, warps = tile(heads, half)
        grid = (tokens, triton.cdiv(heads, block))
        _rotate[grid](
            x,
            x.stride(0),
            x.stride(1),
            cos.contiguous(),
            sin.contiguous(),
            out,
            heads,
            size // 2,
            inverse,
            block,
            half,
            num_warps=warps,
        )
    return out


def tile(heads: int, half: int) -> tuple[int, int]:
    """The number of heads and of warps of a program of `_rotate`.

    Each thread gets 8 values of each half (fewer if the heads are few and small), so that its loads and stores of
    2-byte values take 16 bytes.
    """
    block = min(triton.next_power_of_2(heads), max(1, VALUES // half))
    return block, max(1, block * half // 256)


@triton.jit
def _rotate(
    x,
    token_stride,
    head_stride,
    cos,
    sin,
    out,
    heads,
    half,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    c = tl.load(cos + token * half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        s = -s
    inside = (head < heads)[:, None] & (column < half)[None, :]
    here = token * token_stride + head[:, None] * head_stride + column[None, :]
    first = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + here + half, mask=inside, other=0.0).to(tl.float32)
    there = (token * heads + head[:, None]) * 2 * half + column[None, :]
    tl.store(out + there, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + there + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
