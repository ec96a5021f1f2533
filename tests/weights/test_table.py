"""The arithmetic of the table: merging and sharding have inverses for all sizes; the work of a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import architecture, model_flops, read_architecture, token_flops
from mugrpo_megatron.weights.table import (
    entries,
    merge_from_hf,
    pad_vocab,
    shard,
    split_to_hf,
    stored,
    unshard,
    whole_shape,
)
from tests import models
from tests.models import save_model
from tests.ranks import run_ranks
from tests.weights.ranks_work import stored_shapes

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 6},
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": None},
}


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Any family with any number of heads, groups and layers, tied or not."""
    family = draw(st.sampled_from(sorted(CONFIGS)))
    groups, per_group, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 8]))
    config = {
        "model_type": family,
        "vocab_size": draw(st.integers(3, 40)),
        "hidden_size": groups * per_group * head_dim,
        "intermediate_size": 8 * draw(st.integers(1, 3)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        **CONFIGS[family],
    }
    return architecture(config)


def numbered(shape: tuple[int, ...], start: int) -> torch.Tensor:
    """No two values of a model are equal, so that every misplaced one shows."""
    return torch.arange(start, start + torch.Size(shape).numel()).view(shape)


@given(architectures(), st.sampled_from([1, 2, 4, 8]))
def test_merge_shard_unshard_split_is_the_identity(model: Architecture, size: int) -> None:
    for entry in entries(model).values():
        shapes = entry.hf_shapes(model)
        tensors = [numbered(shape, 1000 * location) for location, shape in enumerate(shapes, start=1)]
        unsharded = merge_from_hf(entry, tensors, model)
        assert tuple(unsharded.shape) == whole_shape(entry, model)
        rows = -(-len(unsharded) // size) * size if entry.row.form == "vocab" else len(unsharded)
        padded = pad_vocab(entry, unsharded, rows)
        assert not padded[len(unsharded) :].any()
        halves = [half.shape[0] for half in padded.chunk(2)] if entry.row.form == "gated" else [padded.shape[0]]
        dimension = {"rows": min(halves), "columns": padded.shape[-1], "none": size}[entry.row.split]
        if dimension % size:
            continue  # a layout that does not divide the model is refused before any weight is touched
        parts = [shard(entry, padded, size, rank) for rank in range(size)]
        back = split_to_hf(entry, unshard(entry, parts), model)
        for tensor, result in zip(tensors, back, strict=True):
            assert torch.equal(tensor, result.reshape(tensor.shape)), entry.megatron


@given(architectures())
def test_every_tensor_has_one_place(model: Architecture) -> None:
    table = entries(model)
    names = [name for entry in table.values() for name in entry.hf]
    locations = [place for entry in table.values() for place in stored(entry, model)]
    assert len(names) == len(set(names))
    assert len(locations) == len({(location.key, location.index) for location in locations})
    assert ("lm_head.weight" in names) is not model.tied


@pytest.mark.process
def test_stored_keys_are_megatrons_own(tmp_path: Path) -> None:
    for family in models.FAMILIES:
        models.save_model(tmp_path / family, family)
    (result,) = run_ranks(1, stored_shapes, [tmp_path / family for family in models.FAMILIES])
    for family, (table, megatrons, _) in zip(models.FAMILIES, result, strict=True):
        assert table == megatrons, family


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen2", {}), ("llama", {}), ("deepseek_v3", {}), ("deepseek_v3", {"q_lora_rank": None})]
)
def test_forward_flop_are_those_that_torch_counts(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = save_model(tmp_path, family, **changes)
    architecture = read_architecture(tmp_path)
    tokens = 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None])
    work = token_flops(architecture, tokens)
    chosen = architecture.transformer.get("moe_router_topk", 0)
    routed = (architecture.layers - architecture.dense_layers) * chosen * architecture.letters["M"]
    layers = work.layers - 2 * 3 * architecture.letters["H"] * routed  # torch does not count the experts' products
    # Eager attention computes the full square, and torch counts it; causal attention needs half.
    assert counter.get_total_flops() == pytest.approx(tokens * (layers + 2 * work.attention + work.head), rel=0.01)


def test_flop_of_gated_delta_networks_are_those_that_torch_counts(tmp_path: Path) -> None:
    """Except for the rule itself, which transformers computes in chunks; it is held to the products of the recurrence:
    a key reads the state, the state gets key times value, a query reads it."""

    def without_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> Any:
        return torch.zeros_like(value), None

    model, tokens = save_model(tmp_path, "qwen3_5_text"), 24
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = without_rule  # type: ignore[assignment]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None], use_cache=False)
    architecture = read_architecture(tmp_path)
    work, (linear, heads, key, value) = token_flops(architecture, tokens), (3, 8, 8, 12)
    layers = work.layers - 2 * linear * heads * 3 * key * value
    assert counter.get_total_flops() == pytest.approx(tokens * (layers + 2 * work.attention + work.head), rel=0.01)


def test_a_token_of_a_mixture_pays_for_its_experts_and_the_router(tmp_path: Path) -> None:
    """torch does not count the grouped products of experts, so they are held to the dense model of the same width."""
    save_model(tmp_path / "moe", "qwen3_moe", num_experts_per_tok=3, moe_intermediate_size=40)
    save_model(tmp_path / "dense", "qwen3", head_dim=8, intermediate_size=120)
    moe, dense = (read_architecture(tmp_path / name) for name in ("moe", "dense"))
    router = 2 * moe.layers * moe.letters["H"] * moe.experts
    assert token_flops(moe, 9.0).layers == token_flops(dense, 9.0).layers + router


def test_an_update_counts_every_sequence_and_only_trained_logits(tmp_path: Path) -> None:
    save_model(tmp_path)
    architecture = read_architecture(tmp_path)
    lengths, trained = [5, 17, 9], 12
    parts = [token_flops(architecture, length) for length in lengths]
    forward = sum(length * (flops.layers + flops.attention) for length, flops in zip(lengths, parts, strict=True))
    assert model_flops(architecture, lengths, trained) == pytest.approx(3 * (forward + trained * parts[0].head))
