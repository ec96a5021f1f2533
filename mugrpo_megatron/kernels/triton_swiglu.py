"""SwiGLU and its gradient as Triton kernels: one program a row, which reads its inputs once and computes in float32.

With weights it is an expert's: each row times the router's probability, without keeping the product that is weighted.
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


def swiglu(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """x [..., 2 f] = [gate, up] -> silu(gate) * up [..., f] in the type of x, rounded once.

    `weights` float [...] multiplies each row.
    """
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    if out.numel():
        rows = x if weights is None else weights.contiguous()
        width = out.shape[-1]
        _forward[(out.numel() // width,)](x, rows, out, width, weights is not None, BLOCK, num_warps=WARPS)
    return out


def swiglu_gradient(grad: Tensor, x: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Gradients of `swiglu` in x [..., 2 f] and in `weights` [...], from `grad` [..., f] in its result."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    d_weights = None if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
    if grad.numel():
        rows, d_rows = (x, dx) if weights is None or d_weights is None else (weights.contiguous(), d_weights)
        width = grad.shape[-1]
        grid = (grad.numel() // width,)
        _backward[grid](grad, x, rows, dx, d_rows, width, weights is not None, BLOCK, num_warps=WARPS)
    return dx, d_weights


@triton.jit
def _forward(x, weights, out, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32) if WEIGHTED else 1.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, x, weights, dx, d_weights, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """With s = sigmoid(gate):  d_gate = w dy up s (1 + gate (1 - s)),  d_up = w dy gate s,  d_w = sum dy gate s up."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32) if WEIGHTED else 1.0
    total = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        here = row * 2 * width + column
        dy = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + here + width, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        if WEIGHTED:
            total += tl.sum(dy * gate * share * up, 0)
        dy *= weight
        d_gate = dy * up * share * (1.0 + gate * (1.0 - share))
        d_up = dy * gate * share
        tl.store(dx + here, d_gate.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + here + width, d_up.to(dx.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(d_weights + row, total)
