"""RMSNorm, SwiGLU and rotary embedding with hand-written backward passes, and the rotary frequencies.

In plain PyTorch each of them makes a dozen passes over memory, which on small models cost as much as the matrix
products. Written by hand they make a few passes, most of them in place. On CUDA the norm is one kernel of torch, and
SwiGLU and the rotation are kernels of this project. Megatron's own fusions are not used, because every rank would
compile them at its first update.

Megatron's rotary classes hard-code llama3's band edges and read YaRN's numbers from undeclared config attributes, so
the frequencies are computed here from the checkpoint's numbers, and the model takes them as a buffer. Equations:
RoFormer (Su et al. 2021, arXiv 2104.09864); linear interpolation (Chen et al. 2023, 2306.15595); YaRN (Peng et al.
2023, 2309.00071, sections 3.2 to 3.4); Llama 3 (transformers/modeling_rope_utils.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mugrpo_megatron.weights.architecture import Rope


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, statistics in float32 (arXiv 1910.07467, eq. 4).

    Takes Megatron's arguments. Under sequence parallelism the weight's gradient is summed over TP ranks.
    """

    centre = 0.0
    """Number that is added to the weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., hidden]; the result has its shape and dtype."""
        # On CUDA torch has one kernel for forward and one for backward, which cannot add `centre`. On CPU, where
        # `F.rms_norm` is a series of operations, the function below takes fewer.
        if x.is_cuda and not self.centre:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps, self.centre)


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + its weight, in float32 (Gemma, Qwen3.5)."""

    centre = 1.0


def norm_type(config: TransformerConfig) -> type[RMSNorm]:
    return ZeroCentredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, centre: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        ctx.centre = centre
        if centre:
            return (wide * scale).mul_(weight.float() + centre).to(x.dtype)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """With s = 1 / rms(x), n = x s and g = dy (w + centre): dw = sum dy n, dx = s (g - n mean(g n))."""
        x, weight, scale = ctx.saved_tensors
        dy, width = grads[0].float(), x.shape[-1]
        normed = x.float() * scale
        dw = torch.linalg.vecdot(dy.reshape(-1, width), normed.reshape(-1, width), dim=0)
        g = dy * (weight.float() + ctx.centre if ctx.centre else weight)
        mean = torch.linalg.vecdot(g, normed).div_(width).unsqueeze(-1)
        dx = g.addcmul_(normed, mean, value=-1).mul_(scale)
        return dx.to(x.dtype), dw.to(weight.dtype), None, None


class SwiGLU(MegatronModule):
    """The activation silu(gate) * up of [..., 2 f] = [gate, up] (arXiv 2002.05202); backward needs only its input."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 f] -> [..., f]"""
        return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        if x.is_cuda:
            from mugrpo_megatron.kernels.triton_ops import swiglu  # not at the top: without CUDA Triton may be missing

            return swiglu(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if x.is_cuda:
            from mugrpo_megatron.kernels.triton_ops import swiglu_gradient

            return swiglu_gradient(grads[0], x)
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        d_gate, d_up = dx.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=d_gate)
        torch.mul(F.silu(gate), grads[0], out=d_up)
        return dx


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate as `rotate_` does, but into new memory; `inverse` rotates back.

    On CUDA it is one kernel, which computes in float32 and rounds once whatever the type of the tables.
    """
    if x.is_cuda:
        from mugrpo_megatron.kernels import triton_ops

        rotary, plain = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
        rotated = triton_ops.rotate(rotary, cos, sin, inverse)
        return torch.cat([rotated, plain], dim=-1) if plain.shape[-1] else rotated
    return rotate_(x.clone(), cos, -sin if inverse else sin)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [t, heads, d] in place by the angles of its rows: cos and sin [t, 1, r / 2] (arXiv 2104.09864, eq. 34).

    Dimensions i and i + r / 2 form a pair, as in Llama; dimensions from r on are unchanged. -sin gives the inverse
    rotation, which is also the gradient. With float32 tables a half-precision x is rotated in float32 and rounded once.
    """
    first, second = x[..., : 2 * cos.shape[-1]].chunk(2, -1)
    rotate = (first * cos).addcmul_(second, sin, value=-1)
    second.copy_((second * cos).addcmul_(first, sin))
    first.copy_(rotate)
    return x


def frequencies(rope: Rope) -> torch.Tensor:
    """The rotary frequencies, float32 [rotated dimensions / 2], in radians per token."""
    return KINDS[rope.kind](rope.base, rope.dim, *rope.settings)


def plain(base: float, dim: int) -> torch.Tensor:
    """The frequencies without scaling, float32 [dim / 2]: base^(-2i/dim)."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def linear(base: float, dim: int, factor: float) -> torch.Tensor:
    return plain(base, dim) / factor


def llama3(base: float, dim: int, factor: float, low: float, high: float, original: int) -> torch.Tensor:
    """The frequencies of Llama 3: low frequencies are divided by `factor`, and high ones are kept.

    Low are those with wavelengths above `original` / `low` tokens, high those below `original` / `high`. Between the
    two limits the divided and the kept frequency are blended.
    """
    unscaled = plain(base, dim)
    wavelengths = 2 * math.pi / unscaled
    slowed = torch.where(wavelengths > original / low, unscaled / factor, unscaled)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * slowed / factor + smooth * slowed
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, blended, slowed)


def yarn(
    base: float, dim: int, factor: float, beta_fast: float, beta_slow: float, original: int, truncate: bool
) -> torch.Tensor:
    """The frequencies of YaRN, by the number of their turns over the `original` context.

    A frequency with fewer than `beta_slow` turns is divided by `factor`, and one with more than `beta_fast` turns is
    kept. Between the two limits both are mixed, with weights that change linearly with the dimension.
    """

    def pair_at(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_at(beta_fast), pair_at(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    untouched = 1 - ramp
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (factor * powers) * (1 - untouched) + 1.0 / powers * untouched


KINDS: dict[str, Callable[..., torch.Tensor]] = {"default": plain, "linear": linear, "llama3": llama3, "yarn": yarn}
