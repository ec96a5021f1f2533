"""Buckets: everything once, nothing overlapping, and a stream that equals the model for every bucket size."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from mugrpo_megatron.cpu.sglang import load_mapped
from mugrpo_megatron.weights.buckets import ALIGNMENT, Bucket, pack
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.sync import flattened, serialize
from mugrpo_megatron.weights.table import entries
from tests import models
from tests.ranks import run_ranks
from tests.weights.ranks_work import streams


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
    buckets = list(pack(owners, architecture, bucket_bytes))
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    assert sorted(piece.entry.megatron for piece in pieces) == sorted(owners)
    for bucket in buckets:
        assert {owners[piece.entry.megatron][0] for piece in bucket.pieces} == {bucket.owner}
        assert bucket.bytes <= bucket_bytes or len(bucket.pieces) == 1
        end = 0
        for slot in bucket.slots:
            assert slot.start >= end
            assert slot.start % ALIGNMENT == 0
            end = slot.start + slot.bytes
        assert end <= bucket.bytes


@pytest.mark.process
def test_stream_is_the_model_for_any_bucket_size(model: Path) -> None:
    expected = load_file(model / "model.safetensors")
    for of_rank in run_ranks(2, streams, model, {"expert": 2}, [1, 5_000, 10**9]):
        for found in of_rank:
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(value, torch.from_numpy(found[name])), name


def test_sglang_reads_a_flattened_bucket(model: Path) -> None:
    bucket, flat = _bucket(model)
    received = MultiprocessingSerializer.deserialize(bytes(ForkingPickler.dumps(flattened(bucket, flat))))
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
    bucket, *_ = pack(owners, architecture, 20_000)
    return bucket, torch.randint(0, 255, (bucket.bytes + 100,), dtype=torch.uint8).share_memory_()


def _check_same(bucket: Bucket, flat: torch.Tensor, named: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in named] == [slot.name for slot in bucket.slots]
    for slot, (_, tensor) in zip(bucket.slots, named, strict=True):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.uint8), slot.view(flat).view(torch.uint8))
