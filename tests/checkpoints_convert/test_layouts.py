"""A distributed checkpoint written for one layout, by the conversion or by Megatron, loads in every other."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints_convert import hf_to_megatron, megatron_to_hf
from mugrpo_megatron.recipe.systems import ParallelSection
from tests import models
from tests.ranks import run_ranks
from tests.weights.ranks_work import Layout, reload_megatron, save_training_checkpoint
from tests.weights.tiny import assert_same_weights

pytestmark = pytest.mark.process

MODELS = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 130}),
    "llama": ("llama", {"vocab_size": 131}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3_5_text": ("qwen3_5_text", {"tie_word_embeddings": True, "vocab_size": 130}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
}
LAYOUTS: dict[str, Layout] = {
    "tp1": {},
    "tp4": {"tensor": 4},
    "vpp2": {"pipeline": 2, "virtual_pipeline": 2},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`NAME` Hugging Face, `NAME-converted` cut for TP2 x PP2, of every model."""
    directory = tmp_path_factory.mktemp("models")
    for name, (family, changes) in MODELS.items():
        models.save_model(directory / name, family, **changes)
        hf_to_megatron.convert(directory / name, directory / f"{name}-converted", ParallelSection(tensor=2, pipeline=2))
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversion_loads_in_every_layout(checkpoints: Path, tmp_path: Path, layout: str) -> None:
    cases = [(checkpoints / name, checkpoints / f"{name}-converted", tmp_path / name) for name in MODELS]
    run_ranks(4, reload_megatron, cases, LAYOUTS[layout])
    for name in MODELS:
        assert_same_weights(checkpoints / name, tmp_path / name)


@pytest.mark.parametrize(
    "name", ["qwen2-tied", "qwen3_moe", "qwen3_5_text", pytest.param("deepseek_v3", marks=pytest.mark.night)]
)
def test_training_checkpoint_becomes_hugging_face(checkpoints: Path, tmp_path: Path, name: str) -> None:
    layout = {"tensor": 2, "pipeline": 2}
    run_ranks(4, save_training_checkpoint, checkpoints / name, tmp_path / "saved", layout)
    megatron_to_hf.convert(tmp_path / "saved", tmp_path / name, like=checkpoints / name)
    assert_same_weights(checkpoints / name, tmp_path / name)
