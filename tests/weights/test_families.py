"""Reading a config: real models' configs are understood, rotary frequencies are transformers', the rest is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights.families import architecture
from mugrpo_megatron.weights.rope import frequencies
from tests import models
from tests.weights import tiny

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
REAL: dict[str, dict[str, Any]] = {
    "Qwen2.5-Math-1.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
        "intermediate_size": 8960, "max_position_embeddings": 4096, "max_window_layers": 21, "model_type": "qwen2",
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-4B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "DeepSeekMath 7B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 100000, "eos_token_id": 100001, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
        "use_cache": True, "vocab_size": 102400,
    },
    "R1-Distill-Llama-8B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Moonlight-16B-A3B": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 163584, "eos_token_id": 163586, "ep_size": 1, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11264,
        "kv_lora_rank": 512, "max_position_embeddings": 8192, "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.46.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "dtype": "bfloat16", "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
        "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
        "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "DeepSeek-V3 in bfloat16": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
}  # fmt: skip
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
}
LATENT = {**models.SIZES, **models.FAMILIES["deepseek_v3"], "model_type": "deepseek_v3"}
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', but the learner supports only 'sigmoid'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"topk_group": 1}, "needs groups of equal size and num_experts_per_tok of twice topk_group"),
        ({"n_group": 3}, "needs groups of equal size"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not between 2 and the model's 8 experts"),
        ({"first_k_dense_replace": 4}, "leaves no layer of 4 with routed experts"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not num_attention_heads 4"),
        ({"kv_lora_rank": None}, "has no field 'kv_lora_rank'"),
        ({"rope_parameters": {**tiny.YARN}}, "yarn with mscale equal to mscale_all_dim"),
        ({"rope_parameters": {**tiny.LINEAR}}, "rope scaling of latent attention is none, or yarn"),
        ({"v_head_dim": 25}, "v_head_dim 25 is larger than the 24 dimensions of a query's head"),
    ],
)
def test_what_latent_models_cannot_have_is_refused(changes: dict[str, Any], sentence: str) -> None:
    architecture(LATENT)
    with pytest.raises(UserError) as refused:
        architecture({**LATENT, **changes})
    assert sentence in str(refused.value)


def test_yarn_scales_the_scores_of_latent_attention() -> None:
    """By the square of 0.1 ln 40 + 1, and by nothing in the tables of cos and sin (DeepSeek-V3's inference code)."""
    model = architecture(REAL["DeepSeek-V3 in bfloat16"])
    assert model.rope.attention_factor == 1
    assert model.transformer["softmax_scale"] == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))


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
        ("mistral", {}, "sliding_window 4096 is shorter than max_position_embeddings 8192"),
        ("mistral", {"sliding_window": 1024}, "sliding_window 1024 is shorter"),
        ("llama", {"attention_bias": True}, "attention_bias is True, but the learner supports only False"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}, "num_experts_per_tok is 1 and weights"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, "has no field 'moe_intermediate_size'"),
        (
            "qwen3_moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
            "mlp_only_layers is [0]",
        ),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no field 'low_freq_factor'"),
        ("llama", {"quantization_config": {"bits": 4}}, "the weights are stored in a quantised type"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "the weights are stored in fp8"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "needs attention sinks and weights in mxfp4"),
        ("deepseek_v32", {}, "model_type 'deepseek_v32' is not supported: it needs sparse attention (DSA)"),
        ("glm_moe_dsa", {}, "needs sparse attention (DSA)"),
        ("qwen3_next", {}, "needs linear attention (Gated DeltaNet)"),
        ("qwen3_5_moe", {}, "needs linear attention (Gated DeltaNet)"),
    ],
)
def test_what_the_learner_cannot_honour_is_refused(family: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        architecture({**SMALL, "model_type": family, "max_position_embeddings": 8192, **changes})
    assert sentence in str(refused.value)
