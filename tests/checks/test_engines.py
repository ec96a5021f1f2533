"""What an engine cannot be is said before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from mugrpo_megatron.checks import engines
from mugrpo_megatron.checks.engines import (
    EngineSetup,
    check_engine_device,
    check_without_sync,
    depends_on_device,
    engine_problems,
)
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe
from tests import models
from tests.refusals import refuses

MODEL = {
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "intermediate_size": 18944,
}
BFLOAT16 = {"model": {"dtype": "bfloat16"}}
FP8 = {"engine": {"quantization": "fp8"}}
FP8_CACHE = {"kv_cache_dtype": "fp8_e5m2"}
EQUAL = {"run": {"deterministic": True}}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(sections)


def problems_of(recipe: Recipe, model: Mapping[str, Any]) -> list[str]:
    return list(engine_problems(EngineSetup(recipe, model)))


def check_device(recipe: Recipe, cuda: bool) -> None:
    check_engine_device(EngineSetup(recipe, cuda=cuda))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"engine": {"tensor": 16, "nodes": 2}},
        {"engine": {"extra": {"speculative_algorithm": "NGRAM"}}},
        {**EQUAL, "engine": {"extra": {"attention_backend": "triton"}}},
        {"engine": {"tensor": 4, "quantization": "fp8"}, **BFLOAT16},
        {"engine": {"extra": FP8_CACHE}, **BFLOAT16},
        {"engine": {**FP8["engine"], "between_stages": "restart", "extra": FP8_CACHE}, **BFLOAT16},
        {**FP8, **BFLOAT16, "rollout": {"behaviour": "learner"}, "objective": {"mismatch": "truncate"}},
    ],
)
def test_possible_engines_pass(sections: dict[str, Any]) -> None:
    assert problems_of(recipe(**sections), MODEL) == []


def test_fields_that_transformers_does_not_write_are_asked_for() -> None:
    model = {**models.SIZES, **models.FAMILIES["deepseek_v3"], "model_type": "deepseek_v3"}
    assert problems_of(recipe(), model) == []
    (said,) = problems_of(recipe(), {**model, "scoring_func": None, "topk_method": None})
    assert "lacks scoring_func and topk_method, which SGLang reads" in said
    (said,) = problems_of(recipe(), {**model, "model_type": "glm4_moe_lite", "first_k_dense_replace": None})
    assert "lacks first_k_dense_replace" in said


def test_gated_delta_networks_need_the_new_stack_and_a_regular_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {**models.SIZES, **models.FAMILIES["qwen3_5_text"], "model_type": "qwen3_5_text"}
    monkeypatch.setattr(engines, "has_gated_delta", lambda: False)
    (said,) = problems_of(recipe(), model)
    assert "take the new stack, `run_scripts/setup.sh --stack new`" in said
    monkeypatch.setattr(engines, "has_gated_delta", lambda: True)
    assert problems_of(recipe(), model) == []
    (said,) = problems_of(recipe(), {**model, "full_attention_interval": None})
    assert "lacks full_attention_interval, which SGLang reads" in said
    (said,) = problems_of(recipe(), {**model, "layer_types": model["layer_types"][::-1]})
    assert "full attention in layers 1, and SGLang reads full_attention_interval = 4 alone" in said
    assert any("of a model with gated delta networks" in one for one in problems_of(recipe(**FP8, **BFLOAT16), model))


def test_latent_attention_is_not_quantised() -> None:
    model = {**models.SIZES, **models.FAMILIES["deepseek_v3"], "model_type": "deepseek_v3"}
    said = problems_of(recipe(**FP8, **BFLOAT16), model)
    assert any("of a model with latent attention" in one for one in said)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"engine": {"tensor": 8, "nodes": 3}}, "engine.nodes = 3 does not divide engine.tensor = 8"),
        ({**FP8, "model": {"dtype": "float16"}}, 'set model.dtype = "bfloat16"'),
        ({**FP8, **BFLOAT16, "rollout": {"behaviour": "learner"}}, 'set objective.mismatch = "truncate" or "drop"'),
        ({**BFLOAT16, "engine": {"quantization": "fp8", "tensor": 8}}, "intermediate_size is 2368 on each of 8"),
        (
            {**EQUAL, "engine": {"extra": {"attention_backend": "torch_native"}}},
            "take one of fa3, flashinfer, triton, or",
        ),
        ({**EQUAL, "engine": {"extra": {"speculative_algorithm": "NGRAM"}}}, "by a random stream that all requests"),
        ({"engine": {"extra": {"speculative_algorithm": "EAGLE3"}}}, "'EAGLE3' needs a draft model"),
        (
            {"engine": {**FP8["engine"], "extra": FP8_CACHE}, **BFLOAT16},
            "kv_cache_dtype = 'fp8_e5m2': the cache's scales",
        ),
    ],
)
def test_impossible_engines_are_refused(sections: dict[str, Any], said: str) -> None:
    problems = problems_of(recipe(**sections), MODEL)
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_tied_embeddings_are_refused_where_the_engine_would_not_tie_them(family: str) -> None:
    untied = {**MODEL, "model_type": family}
    (problem,) = problems_of(recipe(), {**untied, "tie_word_embeddings": True})
    assert f"a {family} with tie_word_embeddings" in problem
    assert problems_of(recipe(), {**untied, "tie_word_embeddings": False}) == []
    assert problems_of(recipe(), {**MODEL, "model_type": "qwen3", "tie_word_embeddings": True}) == []


def test_the_engines_routes_need_cuda() -> None:
    wanted = recipe(learner={"routing_replay": "rollout"})
    check_device(wanted, cuda=True)
    check_device(recipe(learner={"routing_replay": "learner"}), cuda=False)
    with pytest.raises(UserError, match=r'"rollout" needs CUDA to generate.*pinned host memory.* set it to "learner"'):
        check_device(wanted, cuda=False)


@pytest.mark.parametrize(
    ("sections", "needs"),
    [
        ({}, False),
        ({"learner": {"routing_replay": "rollout"}}, True),
        (FP8, True),
        (EQUAL, True),
    ],
)
def test_a_run_looks_for_a_device_only_where_the_recipe_needs_one_kind(sections: dict[str, Any], needs: bool) -> None:
    assert depends_on_device(EngineSetup(recipe(**sections))) == needs


def test_engines_of_several_nodes_need_a_learner() -> None:
    wide = recipe(engine={"tensor": 2, "nodes": 2})
    for cuda in (True, False):
        check_device(wide, cuda)
    refuses("needs a learner's ranks on each: leave --engine-only out", check_without_sync, EngineSetup(wide))


def test_fp8_engines_need_cuda_and_a_sync() -> None:
    check_device(recipe(**FP8), cuda=True)
    check_without_sync(EngineSetup(recipe()))
    refuses("needs a learner, whose weight sync quantises", check_without_sync, EngineSetup(recipe(**FP8)))
    refuses(r'quantization = "fp8" needs CUDA.* set it to "none"', check_device, recipe(**FP8), cuda=False)


def test_float32_on_cuda_needs_other_norms() -> None:
    single = {"model": {"dtype": "float32"}}
    for sections, cuda in ((single, False), (BFLOAT16, True), ({**single, **EQUAL}, True)):
        check_device(recipe(**sections), cuda)
    with pytest.raises(UserError, match=r'float32" with an engine on CUDA: .* set model.dtype to "bfloat16", or'):
        check_device(recipe(**single), cuda=True)


def test_deterministic_engines_need_cuda() -> None:
    check_device(recipe(**EQUAL), cuda=True)
    check_device(recipe(), cuda=False)
    with pytest.raises(
        UserError, match=r"run.deterministic = true needs CUDA to generate: .*; set it to false, the le"
    ):
        check_device(recipe(**EQUAL), cuda=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling of type linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope scaling of type llama3"),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, "head_dim 32"),
    ],
)
def test_a_mixtral_is_refused_where_the_engine_would_compute_another_attention(
    changes: dict[str, Any], said: str
) -> None:
    (problem,) = problems_of(recipe(), {**MODEL, "model_type": "mixtral", **changes})
    assert said in problem
    plain = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "rope_parameters": {"rope_type": "default"}}
    assert problems_of(recipe(), {**MODEL, "model_type": "mixtral", **plain}) == []
    assert problems_of(recipe(), {**MODEL, "model_type": "qwen3", **changes}) == []


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_yarn_is_refused_where_the_engine_would_scale_attention_otherwise(name: str) -> None:
    for scaling in (YARN, {**YARN, "attention_factor": None}, {**YARN, "attention_factor": 0.1 * math.log(4) + 1}):
        assert problems_of(recipe(), {**MODEL, name: scaling}) == []
    assert problems_of(recipe(), {**MODEL, name: {"rope_type": "llama3"}}) == []
    for more in ({"attention_factor": 1.0}, {"mscale": 0.707, "mscale_all_dim": 0.707}):
        (problem,) = problems_of(recipe(), {**MODEL, name: {**YARN, **more}})
        assert "engine and learner would be different policies" in problem
    attn_factor = 1 / (0.1 * math.log(4) + 1)
    for same in ({"attn_factor": attn_factor, "attention_factor": 1.0}, {"attn_factor": 0.9}, {"attn_factor": 1}):
        assert problems_of(recipe(), {**MODEL, name: {**YARN, **same}}) == []
    (problem,) = problems_of(recipe(), {**MODEL, name: {**YARN, "attention_factor": 1.0}})
    assert f"set attention_factor = 1 and attn_factor = {attn_factor:.16g} in its" in problem  # the way out
    (problem,) = problems_of(recipe(), {**MODEL, name: {key: YARN[key] for key in YARN if key != "factor"}})
    assert "YaRN has no factor, for which SGLang takes 1" in problem


LATENT = {"model_type": "deepseek_v3", **models.FAMILIES["deepseek_v3"]}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({**LATENT, "rope_scaling": {**YARN, "truncate": False}}, "the model's YaRN has truncate, which SGLang"),
        ({**MODEL, "model_type": "qwen3", "rope_scaling": {**YARN, "beta_fast": None}}, "null for beta_fast"),
        ({**MODEL, "model_type": "llama", "rope_scaling": {**YARN, "attn_factor": None}}, "null for attn_factor"),
        ({**MODEL, "model_type": "mixtral", "rope_theta": 10000.5}, "rope_theta is no whole number"),
        (
            {**MODEL, "model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]},
            "architectures ['Qwen2ForRewardModel'], from which SGLang takes the model's class; set it to ['Qwen2",
        ),
        ({**MODEL, "model_type": "llama", "architectures": None}, "ForCausalLM'], the class of model_type llama"),
    ],
)
def test_a_config_that_the_engine_reads_otherwise_is_refused(model: dict[str, Any], said: str) -> None:
    (problem,) = problems_of(recipe(), model)
    assert said in problem


def test_the_class_of_a_family_passes() -> None:
    for family, name in engines.ENGINE_CLASSES.items():
        assert not engines._other_class(EngineSetup(recipe(), {"model_type": family, "architectures": [name]}))
    kimi = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert not engines._other_class(EngineSetup(recipe(), kimi))
