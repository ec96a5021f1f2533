"""fp8 weights against a reference in float64 that knows the type's values alone."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.weights import quantised
from mugrpo_megatron.weights.buckets import ALIGNMENT, Bucket, Piece, Slot
from mugrpo_megatron.weights.quantised import BLOCK, quantise, quantise_bucket, quantised_bucket
from mugrpo_megatron.weights.table import Entry


def decoded(byte: int) -> float:
    """The value of a byte as e4m3fn: sign, exponent of 4 bits with bias 7, mantissa of 3."""
    exponent, mantissa = byte >> 3 & 15, (byte & 7) / 8
    size = 2.0**-6 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa)
    return -size if byte >> 7 else size


VALUES = np.unique([decoded(byte) for byte in range(256) if byte & 127 != 127])
"""Every finite value of the type."""


def nearest(values: np.ndarray) -> np.ndarray:
    """The nearest value of the type to each float64; either neighbour of a tie."""
    at = np.clip(np.searchsorted(VALUES, values), 1, len(VALUES) - 1)
    below, above = VALUES[at - 1], VALUES[at]
    return np.where(values - below <= above - values, below, above)


def each_block(rows: int, columns: int) -> list[tuple[int, int, slice, slice]]:
    return [
        (r // BLOCK, c // BLOCK, slice(r, r + BLOCK), slice(c, c + BLOCK))
        for r in range(0, rows, BLOCK)
        for c in range(0, columns, BLOCK)
    ]


@settings(max_examples=20)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 3e4]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 99),
    strip=st.sampled_from([1, 1 << 24]),
)
def test_every_value_is_the_nearest_of_its_block(
    rows: int, columns: int, scale: float, dtype: torch.dtype, seed: int, strip: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (scale * torch.randn(rows, columns, generator=generator) ** 3).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised, "STRIP", strip)
        values, scales = quantise(weight)
    assert (values.dtype, scales.dtype, values.shape) == (torch.float8_e4m3fn, torch.float32, weight.shape)
    assert scales.shape == (-(-rows // BLOCK), -(-columns // BLOCK))
    exact, got = weight.double().numpy(), values.double().numpy()
    for r, c, *place in each_block(rows, columns):
        block, found, unit = exact[tuple(place)], got[tuple(place)], float(scales[r, c])
        largest = np.abs(block).max()
        assert unit == pytest.approx(largest / 448 if largest else 1.0, rel=1e-6)
        assert np.abs(found).max() in (0.0, 448.0), "the largest value of a block is the largest of the type"
        error = np.abs(found * unit - block)
        best = np.abs(nearest(block / unit) * unit - block)
        assert (error <= best + 1e-6 * np.abs(block)).all(), "rounded to a value that is not the nearest"
        assert (error <= np.maximum(np.abs(block) / 16, unit * 2.0**-10) * (1 + 1e-5)).all()


def test_nothing_saturates_and_what_is_not_finite_shows() -> None:
    weight = torch.full((BLOCK, 2 * BLOCK), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    values, scales = quantise(weight)
    assert (values.float() == 448).all()
    assert torch.isfinite(scales).all()
    weight[3, 5] = torch.nan
    values, scales = quantise(weight)
    assert scales.isnan().tolist() == [[True, False]]
    assert values[:, BLOCK:].float().isfinite().all()
    assert (quantise(torch.zeros(3, 5))[0].float() == 0).all()


NAMES = {
    "model.embed_tokens.weight": (40, 200),
    "model.layers.0.self_attn.q_proj.weight": (256, 200),
    "model.layers.0.self_attn.q_proj.bias": (256,),
    "model.layers.0.mlp.gate.weight": (8, 200),
    "model.layers.0.mlp.experts.1.down_proj.weight": (200, 130),
    "model.layers.0.block_sparse_moe.experts.1.w1.weight": (128, 200),
    "lm_head.weight": (40, 200),
}


def test_a_bucket_becomes_what_an_fp8_checkpoint_has() -> None:
    entry = cast(Entry, SimpleNamespace())
    slots, start = [], 0
    for name, shape in NAMES.items():
        slots.append(Slot(name, shape, torch.bfloat16, start))
        start += -(-slots[-1].bytes // ALIGNMENT) * ALIGNMENT
    bucket = Bucket((0, None), (Piece(entry, tuple(slots[:3])), Piece(entry, tuple(slots[3:]))), start)
    flat = torch.empty(bucket.bytes + 64, dtype=torch.uint8)
    for slot in slots:
        slot.view(flat).copy_(torch.randn(slot.shape))
    layout = quantised_bucket(bucket)
    out = quantise_bucket(bucket, flat, layout)
    found = {slot.name: slot.view(out) for slot in layout.slots}
    changed = [name for name in NAMES if "proj.weight" in name or ".w1." in name]
    assert len(changed) == 3
    for slot in slots:
        if slot.name in changed:
            values, scales = quantise(slot.view(flat))
            assert torch.equal(found[slot.name].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(found[slot.name + "_scale_inv"], scales)
        else:
            assert torch.equal(found[slot.name], slot.view(flat))
    assert len(found) == len(NAMES) + len(changed)
    assert [len(piece.slots) for piece in layout.pieces] == [4, 6]
    assert layout.bytes == len(out) < bucket.bytes
    ends = [(slot.start, slot.start + slot.bytes) for slot in layout.slots]
    assert all(a[1] <= b[0] and b[0] % ALIGNMENT == 0 for a, b in pairwise(ends))
