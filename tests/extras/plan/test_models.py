"""Shapes of models that are not on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mugrpo_megatron.checks.layouts import bundled
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.case import find_model, parameters
from mugrpo_megatron.recipe import Recipe

PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-8B-Base": 8_190_735_360,
    "Qwen2.5-32B": 32_763_876_352,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen3-30B-A3B": 30_532_122_624,
}
"""Parameters as the models' safetensors files count them."""


def named(name: str) -> Recipe:
    return Recipe.model_validate({"model": {"path": f"models/{name}"}})


@pytest.mark.parametrize("name", sorted(bundled()))
def test_bundled_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert parameters(find_model(named(name)).architecture) == PUBLISHED[name]


def test_a_config_alone_is_enough_and_wins_over_the_table(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(bundled()["Qwen3-8B"]), encoding="utf-8")
    assert find_model(named("Qwen2.5-32B"), path).architecture.layers == 36
    assert find_model(Recipe.model_validate({"model": {"path": str(tmp_path)}})).architecture.layers == 36


def test_a_model_that_nothing_describes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not one of the bundled shapes .*Qwen3-8B.*--model-config"):
        find_model(named("unknown-1B"))
    with pytest.raises(UserError, match=r"no such file"):
        find_model(named("Qwen3-8B"), tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        find_model(named("Qwen3-8B"), tmp_path / "config.json")
