"""Odd model configurations and tokenizers: used as they say, or refused in one sentence, by every reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.checks.layouts import check_layout
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer, load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import ModelConfig, RopeParameters, checked, read_config, read_model_config
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.config import WITHOUT_EFFECT
from mugrpo_megatron.weights.families import FAMILIES, architecture, read_architecture
from mugrpo_megatron.weights.hf import tokenizer_size
from mugrpo_megatron.weights.rope import frequencies
from tests.files.test_hf_config import DENSE
from tests.hostile.damage import ODD_JSON, ODD_TEXTS, damages

ODD = [value for value in ODD_JSON if value != "x" * 5000]
FIELDS = sorted(ModelConfig.__annotations__.keys() | WITHOUT_EFFECT | {"unknown"})


OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
"""What a family needs besides."""


def use(config: dict[str, Any], recipe: Recipe) -> None:
    """What planning, checking and building do with a config."""
    model = architecture(config)
    check_layout(recipe, checked(config, "config.json"), 1)
    assert frequencies(model.rope).shape == (model.letters["D"] // 2,)


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_values_of_every_field(family: str) -> None:
    recipe = Recipe.model_validate({"data": {"max_prompt_tokens": 8}})
    plain = {"model_type": family, **DENSE, **OWN.get(family, {})}
    use(plain, recipe)
    for field in FIELDS:
        for odd in ODD:
            with suppress(UserError):
                use({**plain, field: odd}, recipe)
    for field in sorted(RopeParameters.__annotations__):
        for kind in ("default", "linear", "llama3", "yarn"):
            whole = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope = {**whole, "original_max_position_embeddings": 1024}
            for odd in ODD:
                with suppress(UserError):
                    use({**plain, "rope_scaling": {**rope, field: odd}}, recipe)


def test_damaged_texts(tmp_path: Path) -> None:
    whole = json.dumps({"model_type": "llama", **DENSE}, indent=1).encode()
    readers: tuple[Callable[[Path], object], ...] = (read_config, read_architecture, read_model_config)
    (tmp_path / "model.safetensors").touch()
    for content in (*ODD_TEXTS, *damages(whole, 300, seed=2)):
        (tmp_path / "config.json").write_bytes(content)
        for read in readers:
            with suppress(UserError):
                read(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.json"])
def test_damaged_tokenizers(name: str, tmp_path: Path) -> None:
    build_arithmetic_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / name
    if not path.exists():
        (tmp_path / "tokenizer.json").unlink()
        path.write_text('{"a": 0, "b": 1}')
    whole = path.read_bytes()
    refused = 0
    for content in (*ODD_TEXTS, *damages(whole, 60, seed=3)):
        path.write_bytes(content)
        for read in (tokenizer_size, load_tokenizer):
            try:
                read(tmp_path)
            except UserError as error:
                refused += 1
                assert str(tmp_path) in str(error)
                assert "\n" not in str(error)
    assert refused
