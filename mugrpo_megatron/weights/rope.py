"""Rotary frequencies for every scaling that the families use.

Megatron's rotary classes hard-code llama3's band edges and read YaRN's numbers from undeclared config attributes, so
the frequencies are computed here from the checkpoint's numbers, and the learner's model takes them as a buffer.
Equations: RoFormer (Su et al. 2021, arXiv 2104.09864); linear interpolation (Chen et al. 2023, 2306.15595); YaRN
(Peng et al. 2023, 2309.00071, sections 3.2 to 3.4); Llama 3 (transformers/modeling_rope_utils.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mugrpo_megatron.weights.architecture import Rope


def frequencies(rope: Rope) -> torch.Tensor:
    """float32 [head_dim / 2] radians per token."""
    return KINDS[rope.kind](rope.base, rope.dim, *rope.settings)


def plain(base: float, dim: int) -> torch.Tensor:
    """float32 [dim / 2]: base^(-2i/dim)."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def linear(base: float, dim: int, factor: float) -> torch.Tensor:
    """Positions divided by `factor`."""
    return plain(base, dim) / factor


def llama3(base: float, dim: int, factor: float, low: float, high: float, original: int) -> torch.Tensor:
    """Long wavelengths slowed by `factor`, short ones kept, a smooth band from `original`/high to `original`/low."""
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
    """Slowed below `beta_slow` rotations over the original context, kept above `beta_fast`, a ramp between."""

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
