"""Packed attention equals attention of each sequence alone, values and gradients."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType

from mugrpo_megatron.learner.attention import PackedAttention, make_packing


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """One scaled-dot-product call a segment, as a plain reading of the definition."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    parts = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("ihd,jhd->hij", a, b) * scale
        hidden = torch.ones(len(a), len(a), dtype=torch.bool).triu(1)
        parts.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), c))
    return torch.cat(parts)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    st.sampled_from([None, 0.5]),
)
def test_packed_equals_alone(lengths: list[int], heads: tuple[int, int], scale: float | None) -> None:
    torch.manual_seed(0)
    tokens = sum(lengths)
    shapes = [(tokens, heads[0], 8), (tokens, heads[1], 8), (tokens, heads[1], 8)]
    q, k, v = qkv = [torch.randn(shape, requires_grad=True) for shape in shapes]
    attention = PackedAttention(None, 1, AttnMaskType.causal, "self", softmax_scale=scale)
    packing = make_packing(np.array(lengths), torch.device("cpu"))
    out = attention(*(x.unsqueeze(1) for x in qkv), packed_seq_params=packing).view(tokens, heads[0], 8)
    expected = alone(q, k, v, lengths, scale or 8**-0.5)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(out)
    result = torch.autograd.grad((out * weights).sum(), qkv)
    wanted = torch.autograd.grad((expected * weights).sum(), qkv)
    for a, b in zip(result, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300))
def test_buckets_waste_little(lengths: list[int]) -> None:
    packing = make_packing(np.array(lengths), torch.device("cpu"))
    assert sum(b.count * b.length for b in packing.padding.buckets) <= 1.25 * sum(lengths)
