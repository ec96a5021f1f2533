"""Packed attention equals attention of each sequence alone; torch's flash attention is called as every torch wants."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.attention import list_flash_attention_impls
from torch.nn.attention.varlen import varlen_attn

from mugrpo_megatron.learner.attention import PackedAttention, make_packing
from mugrpo_megatron.learner.context import ContextSplit, attend, fastest_flash, flash_attention


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


def of_torch_2_11(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """The signature in torch 2.11.0 (torch/nn/attention/varlen.py:159), the version that the CUDA install pins."""


@pytest.mark.parametrize("wrapper", [of_torch_2_11, varlen_attn], ids=["2.11.0", "installed"])
@pytest.mark.parametrize("groups", [4, 2])
def test_the_call_fits_the_signature(wrapper: Callable[..., Any], groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(wrapper)

    def bound(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(signature.bind(*args, **options).arguments)
        return args[0]

    bound.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", bound)
    q, k, v = (torch.randn(7, heads, 8) for heads in (4, groups, groups))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    flash_attention(q, k, v, cu, cu, (4, 4), None)
    split = ContextSplit([3, 4], [3, 4], torch.arange(7), cu, cu)
    monkeypatch.setattr("mugrpo_megatron.learner.context.takes_flash", lambda q: True)
    monkeypatch.setattr("mugrpo_megatron.learner.context.gather_rows", lambda rows: rows)
    attend(q, k, v, split, 0.5)
    for call, scale in zip(calls, (None, 0.5), strict=True):
        assert (call["max_q"], call["max_k"], call["window_size"], call["scale"]) == (4, 4, (-1, 0), scale)
        named = "enable_gqa" in signature.parameters
        assert call.get("enable_gqa", False) == (named and groups < 4)


@pytest.mark.parametrize(
    ("capability", "installed", "expected"), [((9, 0), True, "FA3"), ((9, 0), False, "FA2"), ((8, 0), True, "FA2")]
)
def test_flash_attention_3_is_for_hopper_where_it_is_installed(
    capability: tuple[int, int], installed: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own registry imports the package and asks it for kernels."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    active: list[str] = []
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", active.append)
    if installed:
        (tmp_path / "flash_attn_interface.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
    fastest_flash.cache_clear()
    assert fastest_flash() == expected
    assert active == (["FA3"] if expected == "FA3" else [])
    fastest_flash.cache_clear()
    assert "FA3" in list_flash_attention_impls()
