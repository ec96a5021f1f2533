"""SwiGLU and its gradient as Triton kernels: one program a row, which reads its inputs once and computes in float32.

A kernel is compiled once for a width, whatever the number of rows.
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
        _forward[(out.numel() // width,)](x, out, width, BLOCK, num_warps=WARPS)
    return out


def swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of `swiglu` in x [..., 2 f], from `grad` [..., f] in its result."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if grad.numel():
        width = grad.shape[-1]
        _backward[(grad.numel() // width,)](grad, x, dx, width, BLOCK, num_warps=WARPS)
    return dx


@triton.jit
def _forward(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
        tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, x, dx, width, BLOCK: tl.constexpr):
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
