"""The streaming writer makes files that the safetensors library and transformers read."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights import hf
from mugrpo_megatron.weights.families import architecture
from mugrpo_megatron.weights.safetensors_dir import (
    EMBEDDING,
    HEAD,
    INDEX,
    SINGLE,
    HFCheckpoint,
    TensorSpec,
    WeightFile,
    divide,
    open_checkpoint,
    write_index,
    write_shard,
)
from mugrpo_megatron.weights.table import entries
from tests import models
from tests.refusals import refuses

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
    refuses("b has shape", write_shard, tmp_path, shard, [torch.zeros(2), torch.zeros(3)], error=ValueError)
    assert not (tmp_path / SINGLE).exists()


TIED = architecture({**models.SIZES, "model_type": "qwen2", "tie_word_embeddings": True})


def sharded(directory: Path, stored: dict[str, torch.Tensor], indexed: dict[str, str]) -> Path:
    """Two shards of a tied Qwen2 with the tensors of `stored` besides, and an index with `indexed` besides."""
    shapes = {n: s for e in entries(TIED).values() for n, s in zip(e.hf, e.hf_shapes(TIED), strict=True)}
    tensors = {name: torch.ones(shape) for name, shape in sorted(shapes.items())}
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for name, half in zip(names, halves, strict=True):
        save_file(half | (stored if name == names[1] else {}), directory / name)
    weight_map = {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map | indexed}))
    return directory


@pytest.mark.parametrize("name", [HEAD, "model.layers.1.self_attn.rotary_emb.inv_freq"])
@pytest.mark.parametrize("place", ["shard", "index", "index, of a file that is gone", "both"])
def test_index_and_shards_may_differ_about_tensors_that_are_not_needed(name: str, place: str, tmp_path: Path) -> None:
    """Tools drop a tied output layer from the shards and not from the index, or the reverse."""
    stored = {name: torch.ones(TIED.shape("V H"))} if place in ("shard", "both") else {}
    file = "model-00003.safetensors" if "gone" in place else "model-00002-of-00002.safetensors"
    sharded(tmp_path, stored, {} if place == "shard" else {name: file})
    assert EMBEDDING in open_checkpoint(tmp_path, TIED).files


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_moe"])
def test_layers_of_multi_token_prediction_are_not_read(family: str, tmp_path: Path) -> None:
    """Released files of three families have one after the last layer; elsewhere it is a tensor too many."""
    model = architecture({**models.SIZES, **models.FAMILIES[family], "model_type": family, "norm_topk_prob": True})
    shapes = {n: s for e in entries(model).values() for n, s in zip(e.hf, e.hf_shapes(model), strict=True)}
    beyond = f"model.layers.{model.layers}.eh_proj.weight"
    save_file({name: torch.ones(shape) for name, shape in {**shapes, beyond: (2, 2)}.items()}, tmp_path / SINGLE)
    if family == "qwen3_moe":
        refuses(f"has the tensor '{re.escape(beyond)}'", open_checkpoint, tmp_path, model)
    else:
        assert beyond not in shapes
        open_checkpoint(tmp_path, model)


def test_an_output_layer_that_only_a_shard_has_must_equal_the_embedding(tmp_path: Path) -> None:
    sharded(tmp_path, {HEAD: torch.zeros(TIED.shape("V H"))}, {})
    refuses(r"differs from .*, though config.json ties them", open_checkpoint, tmp_path, TIED)


def test_a_stale_single_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path, {}, {})
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE)
    refuses(f"has a {SINGLE} that {INDEX} does not name", open_checkpoint, tmp_path, TIED)


def test_a_needed_tensor_that_only_the_index_has_is_named(tmp_path: Path) -> None:
    sharded(tmp_path, {}, {"model.norm.bias": "model-00001-of-00002.safetensors"})
    refuses(r"disagrees with the shards about 'model\.norm\.bias'", open_checkpoint, tmp_path, TIED)


@pytest.mark.parametrize(("value", "kind"), [(math.nan, r"not a number \(NaN\)"), (-math.inf, "infinite")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_with_a_value_that_is_not_finite_is_named(
    value: float, kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = next(entry for entry in entries(TIED).values() if len(entry.hf) == 2)
    tensors = {name: torch.ones(2, dtype=dtype) for name in entry.hf}
    tensors[entry.hf[1]][1] = value
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = HFCheckpoint(tmp_path, dict.fromkeys(tensors, SINGLE), dict.fromkeys(tensors, dtype))
    monkeypatch.setattr(hf, "tensor_group", lambda entry: None)
    with pytest.raises(UserError, match=rf"{SINGLE}: {re.escape(entry.hf[1])}: a value is {kind}"):
        hf.read_shard(checkpoint, entry, TIED, torch.Size())


@settings(deadline=None)
@given(shapes=SHAPES, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_tensor_is_read_as_the_library_reads_it(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("read")
    tensors = {f"t{number}": torch.randn(shape).to(dtype) for number, shape in enumerate(shapes)}
    save_file(tensors, directory / SINGLE, {"format": "pt"})
    checkpoint = HFCheckpoint(directory, dict.fromkeys(tensors, SINGLE), dict.fromkeys(tensors, dtype))
    for name, tensor in load_file(directory / SINGLE).items():
        read = checkpoint.read(name)
        assert torch.equal(read, tensor)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        read.add_(1)  # a private copy: the file stays
        assert torch.equal(checkpoint.read(name), tensor)


def test_a_header_is_parsed_once_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{number}": torch.ones(2) for number in range(50)}
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = HFCheckpoint(tmp_path, dict.fromkeys(tensors, SINGLE), dict.fromkeys(tensors, torch.float32))
    parsed = []
    loads = json.loads

    def counted(text: str) -> Any:
        parsed.append(1)
        return loads(text)

    monkeypatch.setattr("mugrpo_megatron.weights.safetensors_dir.json.loads", counted)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    assert len(parsed) == 1
    (tmp_path / SINGLE).unlink()
    refuses("cannot be read", checkpoint.read, "t0")
    (tmp_path / SINGLE).write_bytes(b"short")
    refuses("truncated", checkpoint.read, "t0")
