"""Hugging Face -> Megatron -> Hugging Face is the identity, and Megatron computes what transformers computes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import models
from tests.ranks import run_ranks
from tests.weights import tiny
from tests.weights.ranks_work import Layout, logits_of, refused_on_every_rank, replaced, round_trips

pytestmark = pytest.mark.process

LATENT_YARN = {**tiny.YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 130}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": tiny.YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama": ("llama", {"vocab_size": 131}),
    "llama-rope-llama3": ("llama", {"rope_parameters": tiny.LLAMA3, "num_key_value_heads": 4}),
    "llama-rope-linear": ("llama", {"rope_parameters": tiny.LINEAR, "num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-raw": ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"vocab_size": 131}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-yarn": ("deepseek_v3", {"rope_parameters": LATENT_YARN, "q_lora_rank": None, "n_shared_experts": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {"vocab_size": 131}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-normed": ("glm4_moe", {"use_qk_norm": True, "attention_bias": False, "num_key_value_heads": 4}),
    "qwen3_5_text": ("qwen3_5_text", {"tie_word_embeddings": True, "vocab_size": 130}),
    "qwen3_5_text-equal": ("qwen3_5_text", {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
}
BOUNDS = {"qwen3_5": 1e-4}
"""Largest difference of logits for models whose names begin so, else 1e-5. The inputs of a delta rule's state are
divided by their norm: on these models transformers' own float32 is 3.5e-5 from its float64."""
LAYOUTS: dict[str, Layout] = {
    "tp4": {"tensor": 4},
    "tp2pp2": {"tensor": 2, "pipeline": 2},
    "pp2vpp2": {"pipeline": 2, "virtual_pipeline": 2},
}
EXPERT_LAYOUTS: dict[str, Layout] = {
    "ep4": {"expert": 4},
    "tp2ep2": {"tensor": 2, "expert": 2},
    "pp2ep2": {"pipeline": 2, "expert": 2},
}
RARE = ("ep4", "pp2ep2", "tp2pp2ep2")
EIGHT: Layout = {"tensor": 2, "pipeline": 2, "expert": 2}
IDS = [(7 * i * i + 3 * i) % 128 for i in range(152)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name, (family, changes) in MODELS.items():
        models.save_model(directory / name, family, **changes)
    return directory


def routed(name: str) -> bool:
    return any(family in name for family in ("moe", "mixtral", "deepseek"))


def test_an_earlier_export_is_whole_until_the_next_one_is(checkpoints: Path, tmp_path: Path) -> None:
    run_ranks(1, replaced, checkpoints / "qwen2", checkpoints / "llama", tmp_path / "hf")


def test_every_rank_is_told_that_an_export_cannot_be_written(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "qwen2"
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    rank, other = run_ranks(2, refused_on_every_rank, source, tmp_path, {"tensor": 2})
    assert rank == other
    assert [sentence.split(" ", 1)[1][:10] for sentence in rank] == ["cannot be ", "cannot be ", *["is the mod"] * 2]
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    tiny.assert_same_weights(source, tmp_path / "hf")


DIVIDED = (
    *("qwen2-tied", "qwen3", "llama-rope-linear", "mistral", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"),
    "qwen3_5_text",
)
"""A model of each family, one with a single key/value head among them."""


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("tp4", DIVIDED),
        ("tp2pp2", DIVIDED),
        ("pp2vpp2", DIVIDED),
        ("tp2ep2", MODELS),
        *(pytest.param(name, MODELS, marks=pytest.mark.night) for name in ("tp4", "tp2pp2", "pp2vpp2", *RARE)),
    ],
    ids=lambda value: value if isinstance(value, str) else "all" if value is MODELS else "a model of each family",
)
def test_round_trip_is_bitwise(checkpoints: Path, tmp_path: Path, name: str, names: Collection[str]) -> None:
    layout = {**LAYOUTS, **EXPERT_LAYOUTS, "tp2pp2ep2": EIGHT}[name]
    chosen = [model for model in names if routed(model) or name in LAYOUTS]
    cases = [(checkpoints / model, tmp_path / model) for model in chosen]
    run_ranks(8 if layout is EIGHT else 4, round_trips, cases, layout)
    for model in chosen:
        tiny.assert_same_weights(checkpoints / model, tmp_path / model)


@pytest.mark.parametrize(
    ("layout", "names"),
    [({}, MODELS), ({"tensor": 4}, DIVIDED), pytest.param({"tensor": 4}, MODELS, marks=pytest.mark.night)],
    ids=["alone", "a model of each family on 4 ranks", "all on 4 ranks"],
)
def test_logits_are_those_of_transformers(checkpoints: Path, layout: Layout, names: Collection[str]) -> None:
    world = layout.get("tensor", 1)
    (result, *_) = run_ranks(world, logits_of, [checkpoints / model for model in names], layout, IDS)
    for model, megatron in zip(names, result, strict=True):
        with torch.no_grad():
            expected = tiny.load(checkpoints / model)(torch.tensor([IDS])).logits[0].numpy()
        bound = next((bound for start, bound in BOUNDS.items() if model.startswith(start)), 1e-5)
        assert np.abs(megatron - expected).max() < bound, model
