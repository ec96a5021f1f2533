"""Reading a config: real models' configs are understood, rotary frequencies are transformers', the rest is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.operators import frequencies
from mugrpo_megatron.weights.families import architecture
from tests import models
from tests.files.test_hf_config import DENSE
from tests.weights import tiny

SMALL: dict[str, Any] = {**DENSE, "max_position_embeddings": 512}
REAL: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
"""Configs as published, under the name of the model they belong to."""
PARAMETERS = {
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen3-4B": 4_022_468_096,
    "DeepSeekMath 7B": 6_910_365_696,
    "R1-Distill-Llama-8B": 8_030_261_248,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Moonlight-16B-A3B": 15_960_110_208,
    "GLM-4.7-Flash": 29_943_393_920,
    "DeepSeek-V3 in bfloat16": 671_026_419_200,
    "text of Qwen3.5-0.8B": 752_393_024,
}
LATENT: dict[str, Any] = {**models.SIZES, **models.FAMILIES["deepseek_v3"]}
LATENT_CANNOT: list[tuple[dict[str, Any], str]] = [
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax', but the learner supports only 'sigmoid'"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False"),
    ({"topk_group": 1}, "and a num_experts_per_tok of twice topk_group"),
    ({"n_group": 3}, "supports an n_group that divides the number of experts"),
    ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not between 2 and the model's 8 experts"),
    ({"first_k_dense_replace": 4}, "num_hidden_layers is 4 and the first 4 layers are dense"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2 and num_attention_heads 4, but"),
    ({"kv_lora_rank": None}, "has no value of 'kv_lora_rank'"),
    ({"rope_parameters": {**tiny.YARN}}, "yarn whose mscale equals mscale_all_dim"),
    (
        {"rope_parameters": {**tiny.LINEAR}},
        "rope scaling 'linear', which multiplies cos and sin by 1, does not go with latent attention",
    ),
    ({"v_head_dim": 25}, "v_head_dim 25 is larger than the 24 dimensions of a query's head"),
]
DENSE_FIRST = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families whose first layers may be dense."""
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("name", REAL)
def test_published_configs_have_the_published_size(name: str) -> None:
    from mugrpo_megatron.weights.table import entries, whole_shape

    model = architecture(REAL[name])
    counted = sum(torch.Size(whole_shape(entry, model)).numel() for entry in entries(model).values())
    assert counted == PARAMETERS[name]


def test_yarn_scales_the_scores_of_latent_attention() -> None:
    """By the square of 0.1 ln 40 + 1, and by nothing in the tables of cos and sin (DeepSeek-V3's inference code)."""
    model = architecture(REAL["DeepSeek-V3 in bfloat16"])
    assert model.rope.attention_factor == 1
    assert model.transformer["softmax_scale"] == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_yarn_on_a_part_of_each_head_is_refused(family: str) -> None:
    """It scales the products of the rotated dimensions alone; the learner would scale whole scores."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
    config = CONFIG_MAPPING[family](**{**models.SIZES, **models.FAMILIES[family]}).to_dict()
    part = config["rope_parameters"]["partial_rotary_factor"]
    for unscaled in ({}, {"attention_factor": 1.0}):
        config["rope_parameters"] = {**yarn, "partial_rotary_factor": part, **unscaled}
        if unscaled:
            assert architecture(config).transformer["softmax_scale"] == pytest.approx(config["head_dim"] ** -0.5)
        else:
            with pytest.raises(UserError, match=f"only {part:g} of a head is rotated"):
                architecture(config)


MIXTURES = [family for family in models.FAMILIES if family in ("qwen3_moe", "qwen3_5_moe_text", *DENSE_FIRST)]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_without_a_dense_layer_needs_no_width_of_one(family: str) -> None:
    none = {"first_k_dense_replace": 0} if family in DENSE_FIRST else {}
    config = {**models.SIZES, **models.FAMILIES[family], **none, "model_type": family, "norm_topk_prob": True}
    config = {key: value for key, value in config.items() if key not in ("intermediate_size", "mlp_layer_types")}
    model = architecture(config)
    assert (model.dense_layers, model.letters["M"]) == (0, config["moe_intermediate_size"])
    assert model == architecture({**config, "intermediate_size": None})
    if family in DENSE_FIRST:
        with pytest.raises(UserError, match="no value of 'intermediate_size'"):
            architecture({**config, "first_k_dense_replace": 1})


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']}-{len(rope)}")
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    config = CONFIG_MAPPING["llama"](**{**SMALL, "rope_parameters": dict(rope)})
    model = architecture(config.to_dict())
    if rope["rope_type"] == "default":
        expected, factor = 1.0 / rope["rope_theta"] ** (torch.arange(0, 16, 2).float() / 16), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    torch.testing.assert_close(frequencies(model.rope), expected, rtol=1e-6, atol=0)
    assert model.rope.attention_factor == pytest.approx(factor)
    assert model.transformer["softmax_scale"] == pytest.approx(factor**2 / 4)


def test_old_spelling_of_rope_scaling_means_the_same() -> None:
    new = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    base = {**SMALL, "model_type": "qwen2"}
    assert (
        architecture({**base, "rope_parameters": new}).rope
        == architecture({**base, "rope_theta": 1e6, "rope_scaling": old}).rope
    )


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        *(("deepseek_v3", {**LATENT, **changes}, sentence) for changes, sentence in LATENT_CANNOT),
        ("mistral", {}, "sliding_window 4096 is shorter than max_position_embeddings 8192"),
        ("mistral", {"sliding_window": 1024}, "sliding_window 1024 is shorter"),
        ("llama", {"attention_bias": True}, "attention_bias is True, but the learner supports only False"),
        (
            "llama",
            {"attention_bias": True, "hidden_act": "gelu", "logit_scale": 0.5},
            "attention_bias is True, but the learner supports only False; hidden_act is 'gelu', but",
        ),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}, "num_experts_per_tok is 1 and weights"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, "has no value of 'moe_intermediate_size'"),
        (
            "qwen3_moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
            "mlp_only_layers is [0]",
        ),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no value of 'low_freq_factor'"),
        ("llama", {"quantization_config": {"bits": 4}}, "the weights are stored in a quantised type"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "the weights are stored in fp8"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "needs attention sinks and weights in mxfp4"),
        ("deepseek_v32", {}, "model_type 'deepseek_v32' is not supported: it needs sparse attention (DSA)"),
        ("glm_moe_dsa", {}, "needs sparse attention (DSA)"),
        ("qwen3_next", {}, "needs projections of gated delta networks that are grouped by key head"),
        (
            "qwen3_5_moe",
            {},
            "needs a vision tower; extract its text model, qwen3_5_moe_text, with `mugrpo convert text_of`",
        ),
        ("qwen3_5_text", {"linear_num_key_heads": 6}, "32 is not a multiple of linear_num_key_heads 6"),
        ("qwen3_5_text", {"layer_types": ["full_attention"]}, "layer_types names 1 of 2 layers"),
        ("qwen3_5_text", {"layer_types": ["sliding", "full_attention"]}, "linear_attention or full_attention"),
        ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is False"),
        (
            "qwen3_5_text",
            {"head_dim": 12},
            "partial_rotary_factor 0.25 of head_dim 12 is not a positive number of pairs",
        ),
        ("qwen3_5_moe_text", {"norm_topk_prob": False, "moe_intermediate_size": 8}, "norm_topk_prob is False"),
    ],
)
def test_what_the_learner_cannot_honour_is_refused(family: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        architecture({**SMALL, "model_type": family, "max_position_embeddings": 8192, **changes})
    assert sentence in str(refused.value)
