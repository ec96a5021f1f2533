"""Rotary positions: whatever a config says, learner, SGLang and transformers rotate alike, or the config is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mugrpo_megatron.checks.engines import EngineSetup, engine_problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.operators import frequencies
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.config import transformers_config
from mugrpo_megatron.weights.families import architecture
from tests import models

POSITIONS = torch.arange(96)
FAMILIES = [family for family in models.FAMILIES if not family.startswith("qwen3_5")]
"""Those of both versions of SGLang."""
SHORT = Recipe.model_validate({"data": {"max_prompt_tokens": 32}, "rollout": {"max_response_tokens": 64}})
"""A recipe whose sequences have as many positions as are compared."""
Rotation = Callable[[Any], torch.Tensor]


@pytest.fixture(scope="module")
def sglang_rotation() -> Iterator[Rotation]:
    """transformers' config -> float32 [96, rotated]: SGLang's table, cosines and then sines."""
    get_rope = pytest.importorskip("sglang.srt.layers.rotary_embedding.factory", exc_type=ImportError).get_rope
    from sglang.srt.layers.rotary_embedding import base, rope_variant
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(SimpleNamespace(rl_on_policy_target=None))

    def rotation(config: Any) -> torch.Tensor:
        # As the models' constructors in srt/models do: Mixtral drops the scaling, latent attention has its own kind.
        scaling, theta, latent = dict(config.rope_parameters), config.rope_parameters["rope_theta"], "kv_lora_rank"
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        part = scaling.get("partial_rotary_factor") or 1.0
        used: dict[str, Any] | None = scaling
        if config.model_type == "mixtral":
            used, theta = None, int(theta)
        elif hasattr(config, latent):
            head, part = config.qk_rope_head_dim, 1.0
            used = None if scaling["rope_type"] == "default" else {**scaling, "rope_type": "deepseek_yarn"}
        neox = getattr(config, "rope_is_neox_style", True) and not hasattr(config, latent)
        arguments = (head, int(head * part), config.max_position_embeddings, theta, neox, used, torch.float32)
        return torch.as_tensor(get_rope(*arguments).cos_sin_cache[POSITIONS])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(base, "_is_cpu", True)  # by an environment variable of the engine's process
        patched.setattr(rope_variant, "get_device", lambda: "cpu")
        yield rotation


def rotation_of(model: Architecture) -> torch.Tensor:
    angles = POSITIONS[:, None] * frequencies(model.rope)
    return model.rope.attention_factor * torch.cat((angles.cos(), angles.sin()), dim=-1)


def config_of(family: str, **more: Any) -> dict[str, Any]:
    base = CONFIG_MAPPING[family](**{**models.SIZES, **models.FAMILIES[family]}).to_dict()
    for name in ("rope_parameters", "rope_theta", "architectures"):
        base.pop(name, None)
    return {**base, **more}


def agrees(config: dict[str, Any], sglang_rotation: Rotation) -> bool:
    """Whether the config is accepted; AssertionError where it is and the three do not rotate alike."""
    try:
        model = architecture(config)
    except UserError:
        return False
    if list(engine_problems(EngineSetup(SHORT, config))):
        return False
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    torch.testing.assert_close(rotation_of(model), sglang_rotation(theirs), rtol=0, atol=3e-5)
    kind = theirs.rope_parameters["rope_type"]
    if kind != "default" and not model.remarks and not (hasattr(theirs, "kv_lora_rank")):
        expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
        torch.testing.assert_close(frequencies(model.rope), expected, rtol=1e-6, atol=0)
        assert model.rope.attention_factor == pytest.approx(factor)
    return True


def maybe(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A dictionary with each key in half of all cases."""
    drawn = {name: st.one_of(st.just(...), values) for name, values in keys.items()}
    return st.fixed_dictionaries(drawn).map(lambda found: {k: v for k, v in found.items() if v is not ...})


FACTORS = st.floats(1.0, 40.0).map(lambda x: round(x, 3))
THETAS = st.sampled_from([1e4, 1e4 + 0.5, 5e5, 1e6, 10_000_000])
KEYS = maybe(
    rope_theta=THETAS,
    original_max_position_embeddings=st.sampled_from([32, 64, 128, None]),
    attention_factor=st.sampled_from([0.8, 1.0, 1.1386294361119891, None]),
    attn_factor=st.sampled_from([0.8782488562869419, 1.0, 1, None]),
    extrapolation_factor=st.sampled_from([1, 1.0, 0.5]),
    beta_fast=st.sampled_from([32, 16.0, None]),
    beta_slow=st.sampled_from([1, 2.0]),
    mscale=st.sampled_from([1.0, 0.707]),
    mscale_all_dim=st.sampled_from([1.0, 0.707, 0.0]),
    truncate=st.booleans(),
    apply_yarn_scaling=st.booleans(),
    use_fope=st.just(False),
    finetuned=st.just(True),
    low_freq_factor=st.just(1.0),
    high_freq_factor=st.just(4.0),
)
OUTSIDE = maybe(
    rope_theta=THETAS,
    original_max_position_embeddings=st.sampled_from([48, 96]),
    rope_is_neox_style=st.booleans(),
    rope_interleaved=st.just(False),
    partial_rotary_factor=st.sampled_from([0.5, 1.0]),
)


@given(
    family=st.sampled_from(FAMILIES),
    kind=st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic", "longrope"]),
    names=st.sampled_from([("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")]),
    factor=FACTORS,
    keys=KEYS,
    outside=OUTSIDE,
)
def test_learner_and_engine_rotate_alike_or_the_config_is_refused(
    family: str,
    kind: str,
    names: tuple[str, str],
    factor: float,
    keys: dict[str, Any],
    outside: dict[str, Any],
    sglang_rotation: Rotation,
) -> None:
    scaling = {names[1]: kind, "factor": factor, **keys}
    accepted = agrees(config_of(family, **{names[0]: scaling}, **outside), sglang_rotation)
    event(f"{kind}: {'accepted' if accepted else 'refused'}")


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-R1-0528-Qwen3-8B": (
        "qwen3",
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attn_factor": 0.8782488562869419,
            },
        },
    ),
    "Qwen3-8B with YaRN as its page says": (
        "qwen3",
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "Yarn-Llama-2-7b-64k": (
        "llama",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "finetuned": True,
            }
        },
    ),
    "Yarn-Mistral-7b-128k": (
        "mistral",
        {
            "sliding_window": None,
            "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "finetuned": True},
        },
    ),
    "deepseek-coder-6.7b": ("llama", {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "Llama-3.2-1B": (
        "llama",
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "YaRN's temperature said for both": (
        "qwen2",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.0,
                "attn_factor": 1 / (0.1 * math.log(4.0) + 1),
            }
        },
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
}
"""Rope settings as published, with lengths of a small model."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ropes_are_honoured(name: str, sglang_rotation: Rotation) -> None:
    family, more = PUBLISHED[name]
    assert agrees(config_of(family, **more), sglang_rotation)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_a_length_beside_the_scaling_is_refused_where_the_engine_reads_another(kind: str) -> None:
    """Which of the two transformers takes depends on the order of the file's keys."""
    scaling = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    outside = {"original_max_position_embeddings": 64}
    with pytest.raises(UserError, match="is 64 beside the rope scaling, but SGLang takes 256"):
        architecture(config_of("llama", rope_scaling=scaling, **outside))
    architecture(config_of("llama", rope_scaling={**scaling, **outside}, **outside))


@pytest.mark.parametrize(("original", "refused"), [(24, False), (23, True)])
def test_sequences_longer_than_yarns_table_are_refused(original: int, refused: bool) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    problems = list(engine_problems(EngineSetup(SHORT, config_of("qwen3", rope_scaling=scaling))))
    assert any("YaRN has 92 positions" in problem for problem in problems) == refused


def test_an_evaluation_may_have_the_longest_sequences_of_yarns_table() -> None:
    config = config_of("qwen3", **PUBLISHED["Qwen3-8B with YaRN as its page says"][1])  # 64 x 4 positions
    for tokens, refused in ((256 - 32, False), (256 - 31, True)):
        recipe = Recipe.model_validate({**SHORT.model_dump(), "eval": {"max_tokens": tokens}})
        problems = list(engine_problems(EngineSetup(recipe, config)))
        assert any("YaRN has 256 positions" in problem for problem in problems) == refused


def test_deepseeks_attn_factor_takes_yarns_temperature_away() -> None:
    model = architecture(config_of("qwen3", **PUBLISHED["DeepSeek-R1-0528-Qwen3-8B"][1]))
    assert model.rope.attention_factor == pytest.approx(1.0)
    assert model.transformer["softmax_scale"] == pytest.approx(1 / 4)
    assert "attn_factor is honoured" in model.note


def test_transformers_as_a_witness_honours_attn_factor(tmp_path: Path) -> None:
    for name in ("DeepSeek-R1-0528-Qwen3-8B", "Qwen3-8B with YaRN as its page says", "DeepSeek-V3"):
        family, more = PUBLISHED[name]
        written = config_of(family, **more)
        (tmp_path / "config.json").write_text(json.dumps(written))
        model = architecture(written)
        _, factor = ROPE_INIT_FUNCTIONS["yarn"](transformers_config(tmp_path, model), "cpu")
        assert factor == pytest.approx(model.rope.attention_factor)


@pytest.mark.parametrize(
    ("family", "more", "sentence"),
    [
        ("llama", {"rope_is_neox_style": False}, "rope_is_neox_style = False: SGLang reads this"),
        ("mistral", {"rope_is_neox_style": False}, "reorder the rows of q_proj and k_proj"),
        ("llama", {"bias": True}, "bias = True: SGLang reads this"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144}}, "remove the field: the model is the same"),
        ("qwen2", {"original_num_attention_heads": 8}, "original_num_attention_heads = 8: SGLang reads this"),
        ("qwen3", {"scale_emb": 12}, "scale_emb = 12"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk = 2048: SGLang reads this"),
        ("deepseek_v3", {"swiglu_limit": 7.0}, "swiglu_limit = 7.0"),
        ("llama", {"model_max_length": 128}, "model_max_length = 128: SGLang reads this"),
        ("llama", {"is_causal": False}, "is_causal is False, but the learner supports only True"),
        ("qwen3", {"hc_mult": 4}, "hc_mult = 4"),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "extrapolation_factor": 0.5}},
            "extrapolation_factor is 0.5",
        ),
        ("llama", {"rope_scaling": {"rope_type": "default", "use_fope": True}}, "rope scaling: use_fope = True"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "SGLang stretches every position"),
        (
            "qwen2",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 9.0, 40.0]}},
            "rope scaling 'longrope' is not supported; default, linear, llama3 and yarn are. Its factors depend on",
        ),
        (
            "mistral",
            {"rope_parameters": {"rope_type": "su", "factor": 4.0, "rope_theta": 1e4}},
            "rope scaling 'su' is not supported",
        ),
        (
            "qwen3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters differ",
        ),
    ],
)
def test_what_only_the_engine_reads_is_refused_by_name(family: str, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        architecture(config_of(family, **more))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"rope_is_neox_style": True, "bias": False, "model_max_length": 256, "max_seq_len": 4096}),
        ("qwen2", {"dual_chunk_attention_config": None, "hc_mult": 1, "multi_query": False}),
        ("mistral", {"attention_bias": False}),
        ("qwen3_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0}),
        ("deepseek_v3", {"index_topk": None, "swiglu_limit": None}),
    ],
)
def test_values_with_which_the_engine_does_the_same_are_noted(family: str, more: dict[str, Any]) -> None:
    model = architecture(config_of(family, **more))
    assert set(more) - {"shared_expert_intermediate_size"} <= set(model.unread)
    assert model == architecture(config_of(family))
