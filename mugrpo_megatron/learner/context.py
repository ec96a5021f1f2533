"""Context parallelism: one packed row split over ranks, keys and values all-gathered.

A row of L tokens is cut into 2 C blocks for C ranks, and rank r holds blocks r and 2 C - 1 - r, which balances causal
attention (the pairing of "zigzag" ring attention; keys and values are all-gathered as in Llama 3, arXiv 2407.21783,
section 3.3.2). Embeddings, norms and matrix products work on a rank's own rows; attention sees the keys of all ranks.
For the loss the hidden states are gathered and every rank takes whole responses, so objectives do not see the split.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.nn import attention
from torch.nn.attention.bias import causal_lower_right


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
        cu_queries, cu_keys: int32 [n + 1], bounds of the n segments; a segment's queries are those of its last keys.
        longest: largest number of queries and of keys of a segment.
        scale: factor of the scores; None is d^-1/2.
    """
    from torch.nn.attention.varlen import varlen_attn  # the import works without CUDA, the call does not

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if q.shape[1] != k.shape[1] and _asks_for_groups(varlen_attn):
        options["enable_gqa"] = True
    out = varlen_attn(q, k, v, cu_queries, cu_keys, *longest, **options)
    # `varlen_attn` returns a tuple only when the log-sum-exp is requested.
    return cast(torch.Tensor, out)


@cache
def fastest_flash() -> str:
    """Activate flash attention 3 for this process if the GPU is a Hopper and its kernels are installed.

    Returns the version that runs, "FA3" or "FA2".
    """
    # torch has the calls of version 3; the kernels come with the package `flash_attn_interface`.
    name = "FA3"
    hopper = torch.cuda.get_device_capability()[0] == 9
    if not hopper or name not in attention.list_flash_attention_impls() or not find_spec("flash_attn_interface"):
        return "FA2"
    attention.activate_flash_attention_impl(name)
    return name


@cache
def _asks_for_groups(wrapper: Callable[..., Any]) -> bool:
    """Whether this torch has the option `enable_gqa`; a torch that has it needs it for grouped-query heads."""
    # torch 2.11.0, which SGLang pins, has no such option, and its kernel takes fewer key/value heads than query heads.
    # Later versions refuse that without the option.
    return "enable_gqa" in inspect.signature(wrapper).parameters


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """A rank's part of a packed row, as P spans: a span is the rows of one segment in one of the rank's two blocks."""

    queries: list[int]
    """[P]: number of rows of each span, in the order of the rank's rows."""
    keys: list[int]
    """[P]: number of rows that each span attends to, from its segment's start to the span's end."""
    key_rows: torch.Tensor
    """int64 [sum of keys]: indices of the rows that each span attends to, among the rows of all ranks gathered in rank
    order."""
    cu_queries: torch.Tensor
    """int32 [P + 1]: where each span's queries start, and where the last span's end."""
    cu_keys: torch.Tensor
    """int32 [P + 1]: where each span's keys start, and where the last span's end."""


def local_rows(length: int, rank: int, size: int) -> np.ndarray:
    """int64 [length / size]: indices of this rank's rows of a packed row; 2 `size` divides `length`, or `size` is 1."""
    if size == 1:
        return np.arange(length)
    blocks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate([blocks[rank], blocks[2 * size - 1 - rank]])


def gathered_indices(length: int, size: int) -> np.ndarray:
    """int64 [length]: where each row of a packed row stands after a gather that concatenates the ranks' rows."""
    indices = np.empty(length, dtype=np.int64)
    indices[np.concatenate([local_rows(length, rank, size) for rank in range(size)])] = np.arange(length)
    return indices


def split_segments(offsets: np.ndarray, rank: int, size: int, device: torch.device) -> ContextSplit:
    """Rank `rank`'s part of a packed row that `size` ranks share; `offsets` int [n + 1] are its n segments' bounds."""
    length = int(offsets[-1])
    block = length // (2 * size)
    queries, keys = [], []
    for start in (rank * block, (2 * size - 1 - rank) * block):
        cuts = [start, *(int(o) for o in offsets if start < o < start + block), start + block]
        for begin, end in pairwise(cuts):
            segment = int(offsets[np.searchsorted(offsets, begin, side="right") - 1])
            queries.append(end - begin)
            keys.append(np.arange(segment, end))
    key_rows = gathered_indices(length, size)[np.concatenate(keys)]
    counts = [len(rows) for rows in keys]
    return ContextSplit(
        queries,
        counts,
        torch.from_numpy(key_rows).to(device),
        _cumulative(queries, device),
        _cumulative(counts, device),
    )


def gather_rows(x: torch.Tensor) -> torch.Tensor:
    """Gather the rows [t, ...] of every context parallel rank to [t * C, ...], in rank order.

    Backward sums the ranks' gradients of each row.
    """
    group = parallel_state.get_context_parallel_group()
    return cast(torch.Tensor, gather_from_sequence_parallel_region(x.contiguous(), True, group))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, split: ContextSplit, scale: float | None) -> torch.Tensor:
    """Compute causal attention of this rank's queries [t, hq, d] to the keys and values of all ranks.

    `k` and `v` [t, hkv, d] are this rank's, and are gathered here. Returns [t, hq, d]. Collective.
    """
    heads = (k.shape[1], v.shape[1])
    k, v = gather_rows(torch.cat([k, v], dim=1)).index_select(0, split.key_rows).split(heads, dim=1)
    if takes_flash(q):
        longest = max(split.queries), max(split.keys)
        return flash_attention(q, k, v, split.cu_queries, split.cu_keys, longest, scale)
    parts, grouped = [], q.shape[1] != heads[0]
    for a, b, c in zip(q.split(split.queries), k.split(split.keys), v.split(split.keys), strict=True):
        a, b, c = (x.transpose(0, 1)[None] for x in (a, b, c))
        mask = causal_lower_right(a.shape[2], b.shape[2])
        out = F.scaled_dot_product_attention(a, b, c, attn_mask=mask, scale=scale, enable_gqa=grouped)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _cumulative(counts: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)
