"""Batched attention over a paged cache against one attention call for every sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from mugrpo_megatron.cpu import batched_attention
from mugrpo_megatron.cpu.batched_attention import attend, plan

LENGTHS = st.lists(
    st.integers(1, 40).flatmap(lambda keys: st.tuples(st.integers(1, keys), st.just(keys))), min_size=1, max_size=12
)


def one_by_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: list[torch.Tensor], queries: list[int]
) -> torch.Tensor:
    outputs, start = [], 0
    for rows, count in zip(slots, queries, strict=True):
        group = query.shape[1] // keys.shape[1]
        k = keys[rows].transpose(0, 1).repeat_interleave(group, 0)
        v = values[rows].transpose(0, 1).repeat_interleave(group, 0)
        q = query[start : start + count].transpose(0, 1)
        seen = torch.ones(count, len(rows)).tril(len(rows) - count).bool()
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3).transpose(0, 1))
        start += count
    return torch.cat(outputs)


@given(lengths=LENGTHS, heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (4, 4)]), limit=st.sampled_from([1, 50, 10**6]))
@settings(max_examples=30)
def test_the_same_as_one_sequence_at_a_time(lengths: list[tuple[int, int]], heads: tuple[int, int], limit: int) -> None:
    query_heads, kv_heads = heads
    queries, key_lengths = [q for q, _ in lengths], [k for _, k in lengths]
    generator = torch.Generator().manual_seed(len(lengths) * 100 + sum(key_lengths))
    pool = torch.randperm(600, generator=generator)
    keys = torch.randn(600, kv_heads, 8, generator=generator)
    values = torch.randn(600, kv_heads, 5, generator=generator)
    query = torch.randn(sum(queries), query_heads, 8, generator=generator)
    # The table's rows are in another order than the sequences, and hold garbage after them.
    requests = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)]
    table = torch.randint(0, 600, (len(lengths) + 3, 64), generator=generator, dtype=torch.int32)
    slots = list(pool[: sum(key_lengths)].split(key_lengths))
    for request, rows in zip(requests.tolist(), slots, strict=True):
        table[request, : len(rows)] = rows.int()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_attention, "BATCH_TOKENS", limit)
        batches = plan(table, requests, torch.tensor(queries), torch.tensor(key_lengths))
    result = attend(query, keys, values, batches, scale=0.3)
    torch.testing.assert_close(result, one_by_one(query, keys, values, slots, queries), atol=1e-5, rtol=1e-5)


@given(lengths=LENGTHS)
@settings(max_examples=30)
def test_batches_are_useful_and_bounded(lengths: list[tuple[int, int]]) -> None:
    queries, key_lengths = (torch.tensor(column) for column in zip(*lengths, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_attention, "BATCH_TOKENS", 100)
        batches = plan(
            torch.zeros(len(lengths), 64, dtype=torch.int32), torch.arange(len(lengths)), queries, key_lengths
        )
    assert sum(len(batch.visible) for batch in batches) == len(lengths)
    for batch in batches:
        assert len(batch.visible) == 1 or len(batch.slots) <= 100
        keys_of_last_query = batch.visible[:, 0, -1].sum(-1)
        assert (keys_of_last_query >= batched_attention.USEFUL_FRACTION * batch.visible.shape[-1]).all()


def test_many_sequences_of_one_length_share_a_call() -> None:
    ones, tens = torch.ones(500, dtype=torch.long), torch.full((500,), 10)
    assert len(plan(torch.zeros(500, 16, dtype=torch.int32), torch.arange(500), ones, tens)) == 1
