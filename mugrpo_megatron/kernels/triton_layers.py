"""SwiGLU and the rotary embedding of the layers as Triton kernels, forward and backward.

Each reads its inputs once, computes in float32 and rounds once. SwiGLU has one program a row, and is compiled once for
a width, whatever the number of rows; the rotation's program takes one token and a block of its heads, which share the
token's angles.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel's parameters get their types when it is compiled for a call.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
WARPS = 4
"""8 values of 2 bytes a thread: loads and stores of 16 bytes."""


def swiglu(x: Tensor) -> Tensor:
    """x [..., 2 f] = [gate, up] -> silu(gate) * up [..., f] in the type of x, rounded once."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    if out.numel():
        width = out.shape[-1]
        _swiglu[(out.numel() // width,)](x, out, width, BLOCK, num_warps=WARPS)
    return out


def swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of `swiglu` in x [..., 2 f], from `grad` [..., f] in its result."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if grad.numel():
        width = grad.shape[-1]
        _swiglu_gradient[(grad.numel() // width,)](grad, x, dx, width, BLOCK, num_warps=WARPS)
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
    """With s = sigmoid(gate):  d_gate = dy up s (1 + gate (1 - s)),  d_up = dy gate s."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        here = row * 2 * width + column
        dy = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + here + width, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        d_gate = dy * up * share * (1.0 + gate * (1.0 - share))
        d_up = dy * gate * share
        tl.store(dx + here, d_gate.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + here + width, d_up.to(dx.dtype.element_ty), mask=inside)


VALUES = 2048
"""Most values of each half in a program."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """`learner.operators.rotate_` of x [t, heads, d] into new memory, in the type of x, rounded once.

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
    """Heads and warps of a program: 8 values of each half a thread, so that loads and stores take 16 bytes."""
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
