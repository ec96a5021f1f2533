"""Attention over a paged KV cache on CPU: sequences of similar length share one call of scaled_dot_product_attention.

SGLang's CPU backend makes one call for every sequence and layer. Each call costs tens of microseconds, which for
hundreds of short sequences is nearly all of a small model's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

BATCH_TOKENS = 1 << 14
"""The largest number of key tokens in a call for several sequences, padding included: its keys and values then fit the
processor's cache. A sequence with more has a call of its own."""
BATCH_SCORES = 1 << 24
"""The largest number of attention scores (padded queries x padded keys) in a call for several sequences; it limits the
size of the mask."""
USEFUL_FRACTION = 0.75
"""A sequence with fewer keys than this fraction of those of the batch's longest sequence starts a new batch."""


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """B sequences that attend in one call, padded at the right to E query tokens and L keys."""

    queries: torch.Tensor
    """int64 [B * E]: rows of the query tensor; padding repeats a sequence's last query."""
    slots: torch.Tensor
    """int64 [B * L]: rows of the KV cache; those of padding are arbitrary rows, which `visible` hides."""
    visible: torch.Tensor
    """bool [B, 1, E, L]: whether a query sees a key."""


def plan(
    slot_table: torch.Tensor, requests: torch.Tensor, query_lengths: torch.Tensor, key_lengths: torch.Tensor
) -> list[DecodeBatch]:
    """Group the sequences of a forward pass into batches of similar length.

    All arguments are int tensors on CPU. `slot_table` [requests, positions] has the cache row of every position of a
    request. Sequence i is request `requests[i]`, with `key_lengths[i]` positions, and queries for the last
    `query_lengths[i]` of them. Query rows are concatenated in the order of the sequences.
    """
    starts = query_lengths.cumsum(0) - query_lengths
    batches = []
    for members in _similar(query_lengths, key_lengths):
        queries, keys = query_lengths[members, None], key_lengths[members, None]
        query = torch.arange(int(queries.max())).minimum(queries - 1)  # [B, E]
        position = torch.arange(int(keys.max()))
        batches.append(
            DecodeBatch(
                queries=(starts[members, None] + query).flatten(),
                slots=slot_table[requests[members], : len(position)].flatten().long(),
                visible=(position <= (keys - queries + query)[:, :, None])[:, None],
            )
        )
    return batches


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batches: list[DecodeBatch], scale: float
) -> torch.Tensor:
    """Compute causal attention of query [T, Hq, D] to the cache's keys and values [slots, Hkv, D]; returns [T, Hq, Dv].

    Hq is a multiple of Hkv (grouped-query attention). The query heads of a group are treated as more queries of its
    key and value head.
    """
    tokens, query_heads, width = query.shape
    kv_heads, value_width = keys.shape[1], values.shape[2]
    output = query.new_empty(tokens, query_heads * value_width)
    for batch in batches:
        b, _, e, length = batch.visible.shape
        rows = query.reshape(tokens, -1).index_select(0, batch.queries)
        grouped = rows.view(b, e, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        group = grouped.shape[2]
        seen = batch.visible[:, :, None].expand(b, 1, group, e, length).reshape(b, 1, group * e, length)
        attended = scaled_dot_product_attention(
            grouped.reshape(b, kv_heads, group * e, width),
            _rows(keys, batch.slots, b),
            _rows(values, batch.slots, b),
            attn_mask=seen,
            scale=scale,
        )
        attended = attended.view(b, kv_heads, group, e, value_width).permute(0, 3, 1, 2, 4)
        # A padded entry repeats a real query, so both write the same value and the order of writes does not matter.
        output.index_copy_(0, batch.queries, attended.reshape(b * e, -1))
    return output.view(tokens, query_heads, value_width)


def _similar(query_lengths: torch.Tensor, key_lengths: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the indices of the sequences of each batch, those with the longest keys first."""
    order = key_lengths.argsort(descending=True)
    queries, keys = query_lengths[order].tolist(), key_lengths[order].tolist()
    start, widest = 0, 0
    for end in range(len(keys) + 1):
        if end < len(keys):
            widest_with = max(widest, queries[end])
            size = end + 1 - start
            fits = size * keys[start] <= BATCH_TOKENS and size * keys[start] * widest_with <= BATCH_SCORES
            if size == 1 or (fits and keys[end] >= USEFUL_FRACTION * keys[start]):
                widest = widest_with
                continue
        yield order[start:end]
        start, widest = end, queries[end] if end < len(keys) else 0


def _rows(cache: torch.Tensor, slots: torch.Tensor, b: int) -> torch.Tensor:
    """The rows `slots` of the cache [slots, H, D], as [B, H, L, D]."""
    _, heads, width = cache.shape
    # index_select copies complete rows, ten times as fast as indexing.
    return cache.view(-1, heads * width).index_select(0, slots).view(b, -1, heads, width).transpose(1, 2)
