"""What the ranks of the weights' tests run; module functions, so that other processes can import them by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.attention import make_packing
from mugrpo_megatron.learner.checkpoint import load_model
from mugrpo_megatron.learner.groups import Ranks, initialize
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.model import PolicyModel, build_model, policy
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.buckets import build_plan, planned_tensors
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.hf import load_hf, save_hf
from mugrpo_megatron.weights.table import entries, stored
from tests.weights.tiny import recipe

Layout = dict[str, Any]
"""Fields of the recipe's `parallel` section."""


def enter(layout: Layout) -> Ranks:
    """Create the process groups of a layout; once in a process, since gloo's threads outlive Megatron's groups."""
    settings = recipe(Path(), **layout)
    ranks = initialize(settings.run, settings.parallel)
    torch.set_num_threads(1)
    return ranks


def uninitialised(hf_dir: Path, layout: Layout, ranks: Ranks) -> tuple[list[PolicyModel], Architecture]:
    """Model chunks of this rank in the layout."""
    architecture, settings = read_architecture(hf_dir), recipe(hf_dir, **layout)
    chunks = build_model(settings.model, settings.parallel, settings.learner, architecture, ranks)
    return [policy(chunk) for chunk in chunks], architecture


def build(hf_dir: Path, layout: Layout, ranks: Ranks) -> tuple[list[PolicyModel], Architecture]:
    """Model chunks of this rank in the layout, with the checkpoint's weights."""
    chunks, architecture = uninitialised(hf_dir, layout, ranks)
    load_hf(chunks, hf_dir, architecture)
    return chunks, architecture


@torch.no_grad()
def logits(chunks: list[PolicyModel], ids: list[int], vocab_size: int) -> torch.Tensor:
    """[tokens, vocabulary] of a model without pipeline stages, gathered over tensor parallel ranks."""
    (chunk,) = chunks
    chunk.eval()
    tokens = torch.tensor(ids)[None]
    positions = torch.arange(len(ids))[None]
    packing = make_packing(np.array([len(ids)]), torch.device("cpu"))
    hidden = chunk(tokens, positions, attention_mask=None, packed_seq_params=packing)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:  # each rank has its part of the tokens
        hidden = gather_from_sequence_parallel_region(hidden)
    local = hidden.squeeze(1) @ chunk.output_weight().T
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts, dim=1)[:, :vocab_size]


def round_trips(cases: list[tuple[Path, Path]], layout: Layout) -> None:
    """Hugging Face -> Megatron in the layout -> Hugging Face, for each (from, to)."""
    ranks = enter(layout)
    for source, target in cases:
        chunks, architecture = build(source, layout, ranks)
        save_hf(chunks, architecture, like=source, out=target)


def replaced(first: Path, second: Path, target: Path) -> None:
    """Save one model, fail to save another in its place, then succeed; the first is whole until then."""
    ranks = enter({})
    saved = {path: build(path, {}, ranks) for path in (first, second)}
    save_hf(*saved[first], like=first, out=target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        save_hf(*saved[second], like=second, out=target)
    with pytest.raises(UserError, match="not a Hugging Face checkpoint"):  # after the weights were written
        save_hf(*saved[second], like=target.parent, out=target, replace=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    save_hf(*saved[second], like=second, out=target, replace=True)
    result, wanted = (load_file(path / "model.safetensors") for path in (target, second))
    assert result.keys() == wanted.keys()
    assert all(torch.equal(result[name], wanted[name]) for name in result)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def refused_on_every_rank(source: Path, folder: Path, layout: Layout) -> list[str]:
    """What this rank is told about places that cannot be written; then it saves to one that can."""
    chunks, architecture = build(source, layout, enter(layout))
    told = []
    for out in (folder / "file" / "hf", folder / ("x" * 255), source, folder / "link"):
        with pytest.raises(UserError) as refused:
            save_hf(chunks, architecture, like=source, out=out, replace=True)
        told.append(str(refused.value))
    save_hf(chunks, architecture, like=source, out=folder / "hf")
    return told


def logits_of(sources: list[Path], layout: Layout, ids: list[int]) -> list[np.ndarray]:
    """Logits of each checkpoint in the layout, the same on every rank."""
    ranks = enter(layout)
    result = []
    for source in sources:
        chunks, architecture = build(source, layout, ranks)
        result.append(logits(chunks, ids, architecture.vocab_size).numpy())
    return result


def reload_megatron(cases: list[tuple[Path, Path, Path]], layout: Layout) -> None:
    """Distributed checkpoint -> model in the layout -> Hugging Face, for each (config of, checkpoint, to)."""
    ranks = enter(layout)
    for like, stored_in, target in cases:
        chunks, architecture = uninitialised(like, layout, ranks)
        load_model(chunks, stored_in)
        save_hf(chunks, architecture, like=like, out=target)


def save_training_checkpoint(source: Path, target: Path, layout: Layout) -> None:
    """Hugging Face -> learner in the layout -> its training checkpoint, optimizer included."""
    learner = build_learner(recipe(source, **layout))
    checkpoint.begin_save(learner, target, {"run": "r", "cursor": {"stage": 0, "age": 0, "updates": 0}})()


Shapes = dict[str, tuple[int, ...]]


def stored_shapes(hf_dirs: list[Path]) -> list[tuple[Shapes, Shapes, list[str]]]:
    """Keys and shapes of distributed checkpoints, by the table and by the model's own `sharded_state_dict`.

    And the names of the model's parameters and frozen buffers.
    """
    ranks = enter({})
    result = []
    for hf_dir in hf_dirs:
        (chunk,), architecture = build(hf_dir, {}, ranks)
        table: Shapes = {}
        for entry in entries(architecture).values():
            table |= {place.key: place.stacked_shape for place in stored(entry, architecture)}
        state = chunk.sharded_state_dict()
        apply_factories(state)
        tensors = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
        names = [name for name, _ in chunk.named_parameters()]
        names += [name for name, _ in chunk.named_buffers() if name.endswith("expert_bias")]
        result.append((table, {tensor.key: tuple(tensor.global_shape) for tensor in tensors}, names))
    return result


def streams(hf_dir: Path, layout: Layout, bucket_sizes: list[int]) -> list[dict[str, np.ndarray]]:
    """What `planned_tensors` yields on this rank, for each bucket size."""
    chunks, architecture = build(hf_dir, layout, enter(layout))
    plans = [build_plan(chunks, architecture, bucket_bytes) for bucket_bytes in bucket_sizes]
    return [
        {name: tensor.clone().numpy() for name, tensor in planned_tensors(plan, chunks, architecture)} for plan in plans
    ]


class Copies(TorchDispatchMode):
    """Counts the calls that copy, each of which is a launch or a few on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        if "copy_" in function.__name__:
            self.calls[function.__name__.split(".")[0]] += 1
        return function(*arguments, **(named or {}))


def copies(hf_dir: Path, layout: Layout, bucket_bytes: int) -> tuple[int, int, dict[str, int]]:
    """Buckets, tensors, and the calls with which this rank fills all buckets."""
    chunks, architecture = build(hf_dir, layout, enter(layout))
    plan = build_plan(chunks, architecture, bucket_bytes)
    with Copies() as counted:
        tensors = sum(1 for _ in planned_tensors(plan, chunks, architecture))
    return len(plan.buckets), tensors, dict(counted.calls)
