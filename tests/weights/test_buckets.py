"""Buckets: everything once, nothing overlapping, and a stream that equals the model for every bucket size.

In fp8: against a reference in float64 that knows the type's values alone.
"""

from __future__ import annotations

from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from mugrpo_megatron.cpu.sglang import load_mapped
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights import buckets
from mugrpo_megatron.weights.buckets import (
    ALIGNMENT,
    BLOCK,
    Bucket,
    ParameterSlots,
    Slot,
    pack_parameters,
    quantise,
    quantise_bucket,
    quantised_bucket,
)
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.sync import flattened_bucket, serialize
from mugrpo_megatron.weights.table import Entry, entries
from tests import models
from tests.ranks import run_ranks
from tests.weights.ranks_work import copies, streams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "qwen3_moe"
    models.save_model(directory, "qwen3_moe", tie_word_embeddings=True)
    return directory


@settings(deadline=None)
@given(bucket_bytes=st.integers(1, 200_000), stages=st.integers(1, 4), experts=st.sampled_from([1, 2, 4]))
def test_buckets_hold_every_tensor_once(model: Path, bucket_bytes: int, stages: int, experts: int) -> None:
    architecture = read_architecture(model)
    owners = {
        name: (
            (entry.layer * stages // architecture.layers, entry.expert % experts if entry.of_expert else None),
            dtype,
        )
        for name, entry in entries(architecture).items()
        for dtype in [torch.float32 if "router" in name else torch.bfloat16]
    }
    buckets = list(pack_parameters(owners, architecture, bucket_bytes))
    pieces = [piece for bucket in buckets for piece in bucket.parameters]
    assert sorted(piece.entry.megatron for piece in pieces) == sorted(owners)
    for bucket in buckets:
        assert {owners[piece.entry.megatron][0] for piece in bucket.parameters} == {bucket.owner}
        assert bucket.bytes <= bucket_bytes or len(bucket.parameters) == 1
        end = 0
        for slot in bucket.slots:
            assert slot.start >= end
            assert slot.start % ALIGNMENT == 0
            end = slot.start + slot.bytes
        assert end <= bucket.bytes
    for piece in pieces:
        places = [(start, start + elements * piece.slots[0].dtype.itemsize) for _, elements, start in piece.runs]
        for slot in piece.slots:
            inside = [place for place in places if slot.start <= place[0] < slot.start + slot.bytes]
            assert sum(end - start for start, end in inside) == slot.bytes
            assert [end for _, end in inside[:-1]] == [start for start, _ in inside[1:]], "the runs follow each other"
        sources = sorted((source, source + elements) for source, elements, _ in piece.runs)
        assert all(a[1] == b[0] for a, b in pairwise(sources)), "every element of the parameter is sent, once"


@pytest.mark.process
def test_stream_is_the_model_for_any_bucket_size(model: Path) -> None:
    expected = load_file(model / "model.safetensors")
    for of_rank in run_ranks(2, streams, model, {"expert": 2}, [1, 5_000, 10**9]):
        for result in of_rank:
            assert result.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(value, torch.from_numpy(result[name])), name


@pytest.mark.process
def test_whole_parameters_are_copied_in_one_call_a_bucket(model: Path) -> None:
    """A call for each tensor is 10 to 20 ms of a sync on an H200; with tensor parallelism, split ones are gathered."""
    [(buckets, tensors, calls)] = run_ranks(1, copies, model, {}, 50_000)
    assert 1 < buckets < tensors / 5
    assert calls == {"_foreach_copy_": buckets}
    for buckets, tensors, calls in run_ranks(2, copies, model, {"tensor": 2}, 50_000):
        assert calls["_foreach_copy_"] <= buckets
        assert 0 < calls["copy_"] < tensors


def test_sglang_reads_a_flattened_bucket(model: Path) -> None:
    bucket, flat = _bucket(model)
    received = MultiprocessingSerializer.deserialize(bytes(ForkingPickler.dumps(flattened_bucket(bucket, flat))))
    assert received["flattened_tensor"].data_ptr() != 0
    flat[0] += 1  # the memory is shared, not copied
    _check_same(bucket, flat, FlattenedTensorBucket(**received).reconstruct_tensors())


def test_engine_reads_a_bucket_and_keeps_its_memory_mapped(model: Path) -> None:
    bucket, flat = _bucket(model)
    engine = Weights()
    for _ in range(2):  # the second time through the same memory
        load_mapped(engine, MultiprocessingSerializer.deserialize(serialize(bucket, flat)))
        flat[0] += 1  # the memory is shared, not copied
        _check_same(bucket, flat, engine.loaded)
        assert set(engine.mapped) == {tensor.untyped_storage().data_ptr() for _, tensor in engine.loaded}
        assert len(engine.mapped) == 1


class Weights(torch.nn.Module):
    """A model that remembers what it was told to load."""

    loaded: list[tuple[str, torch.Tensor]]
    mapped: dict[int, torch.UntypedStorage]

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.loaded = tensors


def _bucket(model: Path) -> tuple[Bucket, torch.Tensor]:
    torch.multiprocessing.set_sharing_strategy("file_system")
    architecture = read_architecture(model)
    owners = dict.fromkeys(entries(architecture), ((0, None), torch.bfloat16))
    bucket, *_ = pack_parameters(owners, architecture, 20_000)
    return bucket, torch.randint(0, 255, (bucket.bytes + 100,), dtype=torch.uint8).share_memory_()


def _check_same(bucket: Bucket, flat: torch.Tensor, named: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in named] == [slot.name for slot in bucket.slots]
    for slot, (_, tensor) in zip(bucket.slots, named, strict=True):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.uint8), slot.view(flat).view(torch.uint8))


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
        patch.setattr(buckets, "STRIP", strip)
        values, scales = quantise(weight)
    assert (values.dtype, scales.dtype, values.shape) == (torch.float8_e4m3fn, torch.float32, weight.shape)
    assert scales.shape == (-(-rows // BLOCK), -(-columns // BLOCK))
    exact, got = weight.double().numpy(), values.double().numpy()
    for r, c, *place in each_block(rows, columns):
        block, result, unit = exact[tuple(place)], got[tuple(place)], float(scales[r, c])
        largest = np.abs(block).max()
        assert unit == pytest.approx(largest / 448 if largest else 1.0, rel=1e-6)
        assert np.abs(result).max() in (0.0, 448.0), "the largest value of a block is the largest of the type"
        error = np.abs(result * unit - block)
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
    bucket = Bucket(
        (0, None), (ParameterSlots(entry, tuple(slots[:3])), ParameterSlots(entry, tuple(slots[3:]))), start
    )
    flat = torch.empty(bucket.bytes + 64, dtype=torch.uint8)
    for slot in slots:
        slot.view(flat).copy_(torch.randn(slot.shape))
    layout = quantised_bucket(bucket)
    out = quantise_bucket(bucket, flat, layout)
    result = {slot.name: slot.view(out) for slot in layout.slots}
    changed = [name for name in NAMES if "proj.weight" in name or ".w1." in name]
    assert len(changed) == 3
    for slot in slots:
        if slot.name in changed:
            values, scales = quantise(slot.view(flat))
            assert torch.equal(result[slot.name].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(result[slot.name + "_scale_inv"], scales)
        else:
            assert torch.equal(result[slot.name], slot.view(flat))
    assert len(result) == len(NAMES) + len(changed)
    assert [len(piece.slots) for piece in layout.parameters] == [4, 6]
    assert layout.bytes == len(out) < bucket.bytes
    ends = [(slot.start, slot.start + slot.bytes) for slot in layout.slots]
    assert all(a[1] <= b[0] and b[0] % ALIGNMENT == 0 for a, b in pairwise(ends))


def test_shared_memory_without_room_is_told_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(ForkingPickler, "dump", full)
    with pytest.raises(UserError, match=r"/dev/shm: .* of .* MiB are free, and the weights' buffers need 1\.0 MiB"):
        serialize(cast(Bucket, SimpleNamespace(slots=())), torch.empty(1 << 20, dtype=torch.uint8))
