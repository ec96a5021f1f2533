"""Packed attention, on the device that there is, against plain attention over each segment alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mugrpo_megatron.learner.attention import PackedAttention, make_packing
from tests.gpu.tiny import DEVICE

LENGTHS = np.array([1, 7, 64, 130, 33])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float32, 1e-3)])
@pytest.mark.parametrize("groups", [8, 2])
def test_segments_do_not_see_each_other(groups: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    tokens = int(LENGTHS.sum())
    q, k, v = (
        torch.randn(tokens, 1, heads, 64, device=DEVICE, dtype=dtype, requires_grad=True)
        for heads in (8, groups, groups)
    )
    attention = PackedAttention(SimpleNamespace(), 1, None, "self")  # type: ignore[arg-type]
    found = attention(q, k, v, packed_seq_params=make_packing(LENGTHS, DEVICE))
    weight = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weight).sum(), (q, k, v))
    parts = []
    for a, b, c in zip(*(x.squeeze(1).split(LENGTHS.tolist()) for x in (q, k, v)), strict=True):
        a, b, c = (x.float().transpose(0, 1)[None] for x in (a, b, c))
        out = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=groups != 8)
        parts.append(out[0].transpose(0, 1).flatten(1))
    expected = torch.cat(parts).unsqueeze(1)
    known = torch.autograd.grad((expected * weight.float()).sum(), (q, k, v))
    for one, other in zip((found, *gradients), (expected, *known), strict=True):
        torch.testing.assert_close(
            one.float(), other.float(), rtol=tolerance, atol=tolerance * float(other.abs().max())
        )
