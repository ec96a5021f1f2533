"""The streaming writer makes files that the safetensors library and transformers read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from mugrpo_megatron.weights.safetensors_dir import (
    INDEX,
    SINGLE,
    TensorSpec,
    WeightFile,
    divide,
    write_index,
    write_shard,
)

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8)


@settings(deadline=None)
@given(shapes=SHAPES, shard_bytes=st.integers(1, 400), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_library_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], shard_bytes: int, dtype: torch.dtype
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    tensors = {f"tensor {n}": torch.randn(shape).to(dtype) for n, shape in enumerate(shapes)}
    shards = divide([TensorSpec(name, tuple(t.shape), dtype) for name, t in tensors.items()], shard_bytes)
    for shard in shards:
        assert shard.bytes <= shard_bytes or len(shard.specs) == 1
        write_shard(directory, shard, (tensors[spec.name] for spec in shard.specs))
    write_index(directory, shards)
    result = {name: value for shard in shards for name, value in load_file(directory / shard.file).items()}
    assert result.keys() == tensors.keys()
    assert all(torch.equal(value, result[name]) for name, value in tensors.items())
    if len(shards) == 1:
        assert shards[0].file == SINGLE
    else:
        placed = json.loads((directory / INDEX).read_text())["weight_map"]
        assert placed == {spec.name: shard.file for shard in shards for spec in shard.specs}


def test_transposed_tensor_is_written_in_its_own_order(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    write_shard(tmp_path, WeightFile(SINGLE, (TensorSpec("t", (3, 2), torch.float32),)), [tensor])
    with safe_open(tmp_path / SINGLE, framework="pt") as opened:
        assert torch.equal(opened.get_tensor("t"), tensor)
        assert opened.metadata() == {"format": "pt"}


def test_stopped_shard_leaves_no_file_of_its_name(tmp_path: Path) -> None:
    shard = WeightFile(SINGLE, (TensorSpec("a", (2,), torch.float32), TensorSpec("b", (2,), torch.float32)))
    with pytest.raises(ValueError, match="b has shape"):
        write_shard(tmp_path, shard, [torch.zeros(2), torch.zeros(3)])
    assert not (tmp_path / SINGLE).exists()
