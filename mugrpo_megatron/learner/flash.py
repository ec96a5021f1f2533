"""Variable-length flash attention, through torch's wrapper of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch


def takes_flash(q: torch.Tensor) -> bool:
    """Whether flash attention supports these queries: only half precision on CUDA."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    longest: tuple[int, int],
    scale: float | None,
) -> torch.Tensor:
    """Causal attention of each segment's queries [t, hq, d] to its keys and values [., hkv, d] -> [t, hq, d].

    Args:
        cu_queries, cu_keys: int32 [n + 1], where the segments begin; queries are aligned with the last keys.
        longest: most queries and most keys of a segment.
        scale: of the scores; None is d^-1/2.
    """
    from torch.nn.attention.varlen import varlen_attn  # loads without CUDA, runs only with it

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if q.shape[1] != k.shape[1] and _asks_for_groups(varlen_attn):
        options["enable_gqa"] = True
    out = varlen_attn(q, k, v, cu_queries, cu_keys, *longest, **options)
    return cast(torch.Tensor, out)  # a pair only when asked for the log-sum-exp


@cache
def _asks_for_groups(wrapper: Callable[..., Any]) -> bool:
    """Whether torch wants to be told of grouped-query heads.

    torch 2.11.0, which SGLang pins, has no such option and passes any heads on to the kernel, which groups them. Later
    ones refuse unequal numbers of heads without `enable_gqa`.
    """
    return "enable_gqa" in inspect.signature(wrapper).parameters
