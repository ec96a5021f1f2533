"""Gives the layers of a loaded SGLang model on CPU the functions of `cpu_kernels` between their matrix products.

SGLang's layers that differ by platform (`MultiPlatformOp`) hold the function that their `forward` calls, chosen when
they are made. Each is exchanged here for one that takes float32 and the plain case, and hands everything else to the
function that was there. SGLang 0.5.15 has a registry for this, for platforms outside its tree only.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from mugrpo_megatron.engine.cpu_kernels import Kernels

HELD = "_forward_method"


def use_kernels(model: torch.nn.Module, kernels: Kernels) -> int:
    """Exchange the functions of the model's norms, gates and rotations; returns how many were."""
    exchanged = 0
    for module in model.modules():
        before = module.__dict__.get(HELD)
        if before is None or before != getattr(module, "forward_native", None):
            continue
        if type(module) is RMSNorm and module.variance_size_override is None:
            module.__dict__[HELD] = _norm(module, kernels, before)
        elif type(module) is SiluAndMul:
            module.__dict__[HELD] = _gate(kernels, before)
        elif isinstance(module, RotaryEmbedding) and _plain(module):
            module.__dict__[HELD] = _rotation(module, kernels, before)
        else:
            continue
        exchanged += 1
    return exchanged


def _norm(module: Any, kernels: Kernels, before: Any) -> Any:
    def norm(x, residual=None, post_residual_addition=None):  # type: ignore[no-untyped-def]
        if post_residual_addition is not None or not (_ready(x) and _ready(module.weight)):
            return before(x, residual, post_residual_addition)
        if residual is None:
            return kernels.rms_norm(x, None, module.weight, module.variance_epsilon)
        if not _ready(residual):
            return before(x, residual)
        return kernels.rms_norm(x, residual, module.weight, module.variance_epsilon), residual

    return norm


def _gate(kernels: Kernels, before: Any) -> Any:
    def gate(x):  # type: ignore[no-untyped-def]
        return kernels.silu_and_mul(x) if _ready(x) else before(x)

    return gate


def _rotation(module: Any, kernels: Kernels, before: Any) -> Any:
    def rotation(positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):  # type: ignore[no-untyped-def]
        cache = module.cos_sin_cache
        if offsets is not None or not (_ready(cache) and _rows(query) and _rows(key) and positions.ndim == 1):
            return before(positions, query, key, offsets, fused_set_kv_buffer_arg)
        for x in (query, key):
            kernels.rotate(x, module.head_size, cache, positions)
        return query, key

    return rotation


def _plain(module: RotaryEmbedding) -> bool:
    """Whether it rotates whole heads, half against half, by a cache of cosines and sines alone."""
    whole = module.rotary_dim == module.head_size and module.is_neox_style and not hasattr(module, "sin_cos_cache")
    return whole and type(module).forward_native is RotaryEmbedding.forward_native


def _ready(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0


def _rows(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.ndim == 2 and x.stride(1) == 1 and len(x) > 0
