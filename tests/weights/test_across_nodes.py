"""Engines of several nodes: each of an engine's ranks is sent what its own node holds of a bucket."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.weights.sync import build_weight_sync, sync
from tests import models
from tests.ranks import run_ranks
from tests.weights.ranks_work import build, enter

pytestmark = pytest.mark.process

BUCKET = 16 * 1024


class Reader:
    """An engine of two ranks, each on a node of its own: what each reads of every bucket, and from whose memory."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.version = fails, -1
        self.read: list[dict[str, torch.Tensor]] = [{}, {}]
        self.files: list[set[str]] = [set(), set()]

    @property
    def readers(self) -> int:
        return len(self.read)

    def load_bucket(self, serialized: list[bytes]) -> None:
        if self.fails:
            raise EngineFailure("it died")
        assert len(serialized) == 2
        for rank, item in enumerate(serialized):
            before = mapped()
            tensors = dict(pickle.loads(item))
            self.read[rank] |= {name: tensor.clone() for name, tensor in tensors.items()}
            self.files[rank] |= mapped() - before
            del tensors

    def set_version(self, version: int) -> None:
        self.version = version


def mapped() -> set[str]:
    """The shared memory of torch that this process maps."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {word for line in maps.splitlines() for word in line.split() if "/torch_" in word}


def engine_of_two_nodes(hf: Path) -> dict[str, object]:
    """What this rank sees of three syncs; its engine fails in the second."""
    layout = {"tensor": 2}
    chunks, architecture = build(hf, layout, enter(layout))
    weight_sync = build_weight_sync(chunks, architecture, BUCKET, engine_tensor=2, engine_nodes=2)
    leads = dist.get_rank() == 0
    reader, dead = Reader(), Reader(fails=True)
    stats = sync(weight_sync, reader if leads else None, version=3)
    try:
        sync(weight_sync, dead if leads else None, version=4)
        failed = False
    except EngineFailure:
        failed = True
    sync(weight_sync, reader if leads else None, version=5)
    return {
        "read": [{name: tensor.numpy() for name, tensor in read.items()} for read in reader.read],
        "mine": mapped(),
        "files": reader.files,
        "version": reader.version,
        "failed": failed,
        "buckets": stats.buckets,
    }


def test_each_rank_of_an_engine_reads_its_own_node_s_memory(tmp_path: Path) -> None:
    models.save_model(tmp_path / "hf", "qwen2", tie_word_embeddings=True)
    first, second = run_ranks(2, engine_of_two_nodes, tmp_path / "hf")
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    for read in first["read"]:
        assert read.keys() == expected.keys()
        assert all(torch.equal(torch.from_numpy(read[name]), expected[name]) for name in expected)
    theirs = first["files"][1]
    assert theirs, "what the second rank reads is no memory of the first"
    assert theirs <= second["mine"], "but of the rank on its own node"
    assert (first["version"], second["version"]) == (5, -1)
    assert (first["failed"], second["failed"]) == (True, False), "the leader alone reports, and no rank waits"
    assert first["buckets"] > 3
