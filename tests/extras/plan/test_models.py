"""Shapes of models that are not on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mugrpo_megatron.checks import engines
from mugrpo_megatron.checks.layouts import bundled_configs
from mugrpo_megatron.engine.launch import kv_bytes_per_token
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.case import find_model, parameters
from mugrpo_megatron.extras.plan.hardware import GIB
from mugrpo_megatron.extras.plan.layer_bytes import CHUNK
from mugrpo_megatron.extras.plan.memory import state_bytes
from mugrpo_megatron.extras.plan.plan import make_plan
from mugrpo_megatron.kernels import gated_delta
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.initial_model import with_cached_model
from mugrpo_megatron.weights.families import FAMILIES
from tests.checkout import ROOT
from tests.hub import NAME, used

PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "DeepSeek-R1-Distill-Llama-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.3-70B": 70_553_706_496,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "DeepSeek-V3": 671_026_419_200,
    "DeepSeek-R1": 671_026_419_200,
    "GLM-4.5-Air": 106_852_251_264,
    "GLM-4.7-Flash": 29_943_393_920,
    "Kimi-K2": 1_026_408_232_448,
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-2-7b-chat-hf": 6_738_415_616,
    "Llama-2-13b-hf": 13_015_864_320,
    "Llama-2-13b-chat-hf": 13_015_864_320,
    "Llama-2-70b-hf": 68_976_648_192,
    "Llama-2-70b-chat-hf": 68_976_648_192,
    "Meta-Llama-3-8B": 8_030_261_248,
    "deepseek-math-7b-base": 6_910_365_696,
    "deepseek-math-7b-instruct": 6_910_365_696,
    "deepseek-math-7b-rl": 6_910_365_696,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "DeepSeek-R1-0528-Qwen3-8B": 8_190_735_360,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Moonlight-16B-A3B": 15_960_111_936 - 27 * 64,
}
"""Parameters as the models' safetensors files count them, a tied output layer once; -Base and -Instruct alike.

Without layers that predict further tokens, of GLM-4.5-Air as in INTELLECT-3; Moonlight's also hold 64 rotary
frequencies in each of 27 layers. Of Qwen3.5's the text, as transformers' class of this shape counts it.
"""
VARIANT = re.compile(r"-(Base|Instruct|Thinking)(-2507)?$")
KV_NUMBERS = {
    "DeepSeek-V3": 61 * 576,
    "GLM-4.5-Air": 46 * 2 * 8 * 128,
    "GLM-4.7-Flash": 47 * 576,
    "Kimi-K2-Instruct": 61 * 576,
    "Moonlight-16B-A3B-Instruct": 27 * 576,
    "Qwen3-30B-A3B": 48 * 2 * 4 * 128,
}
"""Numbers that an engine caches for a token: of latent attention 512 + 64 in each layer (arXiv 2412.19437, 4.2)."""


def named(name: str) -> Recipe:
    return Recipe.model_validate({"model": {"path": f"models/{name}"}})


@pytest.mark.parametrize("name", sorted(bundled_configs()))
def test_bundled_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert parameters(find_model(named(name).model).architecture) == PUBLISHED[VARIANT.sub("", name)]


def test_every_family_has_a_bundled_shape() -> None:
    shapes = {config["model_type"] for config in bundled_configs().values()}
    assert shapes == FAMILIES.keys()


@pytest.mark.parametrize("name", sorted(KV_NUMBERS))
def test_the_cache_of_a_token_is_the_published_one(name: str) -> None:
    assert kv_bytes_per_token(bundled_configs()[name], "bfloat16") == 2 * KV_NUMBERS[name]


def test_a_config_alone_is_enough_and_wins_over_the_table(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(bundled_configs()["Qwen3-8B"]), encoding="utf-8")
    assert find_model(named("Qwen2.5-32B").model, path).architecture.layers == 36
    assert find_model(Recipe.model_validate({"model": {"path": str(tmp_path)}}).model).architecture.layers == 36


def test_gated_delta_networks_cache_a_state_beside_the_keys_of_few_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5-0.8B: 18 layers of 16 states of 128 x 128 and windows of 3 x 6,144 inputs; 6 layers with attention."""
    config = json.loads((ROOT / "tests/weights/published.json").read_text())["text of Qwen3.5-0.8B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = find_model(named("anything").model, tmp_path / "config.json").architecture
    assert state_bytes(model, 2) == 18 * (4 * 16 * 128 * 128 + 2 * 3 * 6144)
    assert kv_bytes_per_token(config, "bfloat16") == 2 * 6 * 2 * 2 * 256
    assert CHUNK == gated_delta.CHUNK
    monkeypatch.setattr(engines, "has_gated_delta", lambda: True)
    plan = make_plan(named("anything"), 1, 1, "h200", tmp_path / "config.json")
    # Measured: 1.326 GiB to Megatron, 1.336 GiB back (a random model of this shape in bfloat16).
    assert plan.conversion_bytes / GIB == pytest.approx(1.336, rel=0.02)
    serving = plan.memory.serving
    assert (plan.parameters, plan.memory.learning.state.moments) == (752_393_024, 8 * 752_393_024)
    assert serving.tokens == int(serving.cache / 1.9 / 12_288)
    assert 0 < serving.requests <= serving.cache * 0.9 / 1.9 / (4 * state_bytes(model, 2))


def test_a_model_that_nothing_describes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not one of the bundled shapes: those are .*Qwen3-8B.*--model-config"):
        find_model(Recipe.model_validate({"model": {"path": str(tmp_path / "unknown")}}).model)
    with pytest.raises(UserError, match=r"did you mean Qwen3-14B"):
        find_model(Recipe.model_validate({"model": {"path": str(tmp_path / "Qwen3-15B")}}).model)
    with pytest.raises(UserError, match=r"no such file"):
        find_model(named("Qwen3-8B").model, tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        find_model(named("Qwen3-8B").model, tmp_path / "config.json")


def test_the_hub_gives_a_shape_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its cache has nothing of the model then, so a run does not take it for downloaded."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(bundled_configs()["Qwen3-8B"]), encoding="utf-8")
    with used(tmp_path / "model", tmp_path, monkeypatch) as hub:
        found = find_model(Recipe.model_validate({"model": {"path": NAME}}).model)
        assert found.architecture.layers == 36
        assert found.source == f"config.json of {NAME} on the hub"
        assert {path.rpartition("/")[2] for path in hub.asked if NAME in path} == {"config.json"}
        assert with_cached_model(Recipe.model_validate({"model": {"path": NAME}})).model.commit is None
        with pytest.raises(UserError, match=r"someone/else: .*could not be downloaded .*no such repository.*network"):
            find_model(Recipe.model_validate({"model": {"path": "someone/else"}}).model)
