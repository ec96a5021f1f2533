"""Configs of published checkpoints, by name: passed, passed with a note about fields that nothing reads, or refused.

Facts of their config.json: sizes, and every field that is not common to their family. No weights.
"""

# ruff: noqa: C408

from __future__ import annotations

import json
from typing import Any

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights.config import CLASSES, FIELDS_OF_CLASSES
from mugrpo_megatron.weights.families import FAMILIES, architecture
from tests.weights.config_fields import table


def dense(
    family: str, hidden: int, ffn: int, layers: int, heads: int, groups: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    sizes = dict(hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads)
    rest = dict(num_key_value_heads=groups, vocab_size=vocab, max_position_embeddings=context, hidden_act="silu")
    return {"model_type": family, **sizes, **rest, "rms_norm_eps": 1e-5, "attention_dropout": 0.0, **more}


def qwen2(hidden: int, ffn: int, layers: int, heads: int, groups: int, context: int = 32768, **more: Any) -> Any:
    window = dict(max_window_layers=layers, sliding_window=context, use_sliding_window=False, rope_theta=1e6)
    return dense("qwen2", hidden, ffn, layers, heads, groups, 151936, context, **window, **more)


def qwen3(hidden: int, ffn: int, layers: int, heads: int, groups: int, **more: Any) -> dict[str, Any]:
    window = dict(max_window_layers=layers, sliding_window=None, use_sliding_window=False, rope_theta=1e6)
    bias = dict(attention_bias=False, head_dim=128, rope_scaling=None)
    return dense("qwen3", hidden, ffn, layers, heads, groups, 151936, 40960, **window, **bias, **more)


def llama(hidden: int, ffn: int, layers: int, heads: int, groups: int, vocab: int, context: int, **more: Any) -> Any:
    base = dict(attention_bias=False, mlp_bias=False, pretraining_tp=1, rope_scaling=None, rope_theta=5e5)
    return dense("llama", hidden, ffn, layers, heads, groups, vocab, context, **{**base, **more})


def moe(**more: Any) -> dict[str, Any]:
    experts = dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1)
    rest = dict(moe_intermediate_size=768, mlp_only_layers=[], router_aux_loss_coef=0.001, output_router_logits=False)
    return qwen3(2048, 6144, 48, 32, 4) | {"model_type": "qwen3_moe", **experts, **rest, **more}


def deepseek(**more: Any) -> dict[str, Any]:
    latent = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    router = dict(n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, ep_size=1)
    rest = dict(scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=2.5)
    pretraining = dict(aux_loss_alpha=0.001, seq_aux=True, moe_layer_freq=1, first_k_dense_replace=3)
    auto = dict(auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, moe_intermediate_size=2048)
    base = dense("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, 163840, num_nextn_predict_layers=1)
    return base | latent | router | rest | pretraining | auto | more


LLAMA3: dict[str, Any] = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
ROPE3: dict[str, Any] = {"rope_scaling": {**LLAMA3, "rope_type": "llama3"}}
YARN: dict[str, Any] = dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
KIMI_YARN: dict[str, Any] = {
    "rope_scaling": {**YARN, "beta_fast": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
}
SMOL: dict[str, Any] = dict(is_llama_config=True, rope_interleaved=False, rope_theta=100000, tie_word_embeddings=True)
JS: dict[str, Any] = {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}}}
CODER: dict[str, Any] = dict(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)
UNSLOTH: dict[str, Any] = dict(unsloth_fixed=True, unsloth_version="2025.3.19")
LLAMA_8B = (4096, 14336, 32, 32, 8, 128256, 131072)
MISTRAL = (4096, 14336, 32, 32, 8)

PASSED: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": qwen2(896, 4864, 24, 14, 2, tie_word_embeddings=True, use_mrope=False),
    "Qwen2.5-1.5B-Instruct": qwen2(1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "Qwen2.5-3B": qwen2(2048, 11008, 36, 16, 2, tie_word_embeddings=True),
    "Qwen2.5-7B-Instruct": qwen2(3584, 18944, 28, 28, 4),
    "Qwen2.5-Coder-32B-Instruct": qwen2(5120, 27648, 64, 40, 8),
    "Qwen2.5-Math-7B": qwen2(3584, 18944, 28, 28, 4, 4096, use_mrope=False),
    "DeepSeek-R1-Distill-Qwen-1.5B": qwen2(1536, 8960, 28, 12, 2, 131072, use_mrope=False),
    "QwQ-32B": qwen2(5120, 27648, 64, 40, 8, 40960),
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-1.7B": qwen3(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-8B": qwen3(4096, 12288, 36, 32, 8),
    "Qwen3-32B": qwen3(5120, 25600, 64, 64, 8),
    "Qwen3-30B-A3B-Instruct-2507": moe(max_position_embeddings=262144, rope_theta=1e7),
    "Qwen3-235B-A22B": moe(hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536),
    "Llama-2-7b-hf": llama(4096, 11008, 32, 32, 32, 32000, 4096, rope_theta=1e4),
    "TinyLlama-1.1B-Chat-v1.0": llama(2048, 5632, 22, 32, 4, 32000, 2048, rope_theta=1e4),
    "Meta-Llama-3-8B": llama(*LLAMA_8B[:-1], 8192),
    "Llama-3.1-8B-Instruct": llama(*LLAMA_8B, **ROPE3, eos_token_id=[128001, 128008, 128009]),
    "Llama-3.2-1B": llama(2048, 8192, 16, 32, 8, 128256, 131072, **ROPE3, head_dim=64, tie_word_embeddings=True),
    "Llama-3.3-70B-Instruct": llama(8192, 28672, 80, 64, 8, 128256, 131072, **ROPE3),
    "deepseek-math-7b-instruct": llama(4096, 11008, 30, 32, 32, 102400, 4096, rope_theta=1e4),
    "Yi-1.5-9B": llama(4096, 11008, 48, 32, 4, 64000, 4096, rope_theta=5e6),
    "Mistral-7B-v0.3": dense("mistral", *MISTRAL, 32768, 32768, sliding_window=None, rope_theta=1e6),
    "Mistral-Small-24B-Instruct-2501": dense(
        "mistral", 5120, 32768, 40, 32, 8, 131072, 32768, sliding_window=None, head_dim=128
    ),
    "Mixtral-8x7B-v0.1": dense(
        "mixtral", *MISTRAL, 32000, 32768, sliding_window=None, num_local_experts=8, num_experts_per_tok=2
    ),
    "DeepSeek-V3 in bfloat16": deepseek(rope_scaling={**YARN, "original_max_position_embeddings": 4096}),
    "Kimi-K2-Instruct in bfloat16": deepseek(
        model_type="kimi_k2", n_routed_experts=384, n_group=1, topk_group=1, first_k_dense_replace=1, **KIMI_YARN
    ),
    "Moonlight-16B-A3B-Instruct": deepseek(q_lora_rank=None, n_group=1, topk_group=1, num_nextn_predict_layers=0),
}
NOTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "SmolLM2-135M-Instruct": (
        llama(576, 1536, 30, 9, 3, 49152, 8192, **SMOL, **JS),
        {"is_llama_config", "rope_interleaved", "transformers.js_config"},
    ),
    "SmolLM2-1.7B": (llama(2048, 8192, 24, 32, 32, 49152, 8192, **SMOL), {"is_llama_config", "rope_interleaved"}),
    "Qwen3-Coder-480B-A35B-Instruct": (moe(**CODER, num_experts=160, hidden_size=6144), {"qkv_bias"}),
    "Qwen3-Coder-30B-A3B-Instruct": (moe(**CODER), {"qkv_bias", "shared_expert_intermediate_size"}),
    "unsloth/Llama-3.2-1B": (
        llama(2048, 8192, 16, 32, 8, 128256, 131072, **ROPE3, unsloth_fixed=True),
        {"unsloth_fixed"},
    ),
    "unsloth/Qwen2.5-7B": (qwen2(3584, 18944, 28, 28, 4, **UNSLOTH), set(UNSLOTH)),
    "unsloth/Qwen3-4B": (qwen3(2560, 9728, 36, 32, 8, **UNSLOTH), set(UNSLOTH)),
    "ALLaM-7B-Instruct-preview": (
        llama(4096, 11008, 32, 32, 32, 64000, 4096, internal_version="7b-alpha"),
        {"internal_version"},
    ),
    "vicuna-7b-v1.1": (llama(4096, 11008, 32, 32, 32, 32000, 2048, max_sequence_length=2048), {"max_sequence_length"}),
    "a fine-tune with NEFTune": (qwen2(896, 4864, 24, 14, 2, neftune_noise_alpha=5.0), {"neftune_noise_alpha"}),
    "a GGUF opened by transformers 5": (
        llama(*LLAMA_8B, _model_name_or_path="Llama", unk_token_id=0),
        {"_model_name_or_path", "unk_token_id"},
    ),
    "a merge of LoRA saved by transformers 4.48": (
        llama(*LLAMA_8B, _attn_implementation_autoset=True, task_specific_params=None, base_model="x/y", lora_r=16),
        {"_attn_implementation_autoset", "task_specific_params", "base_model", "lora_r"},
    ),
    "to_dict() of transformers 4": (
        qwen3(1024, 3072, 28, 16, 8, pruned_heads={}, top_k=50, temperature=0.6, is_decoder=False, max_length=20),
        {"pruned_heads", "top_k", "temperature", "is_decoder", "max_length"},
    ),
    "a Qwen2 written as Llama": (
        llama(*LLAMA_8B, sliding_window=32768, use_sliding_window=False, max_window_layers=28),
        {"sliding_window", "use_sliding_window", "max_window_layers"},
    ),
    "a Llama with types of layers": (llama(*LLAMA_8B, layer_types=["full_attention"] * 32), {"layer_types"}),
    "linear scaling with YaRN's keys": (
        llama(*LLAMA_8B, rope_scaling={"type": "linear", "factor": 2.0, "beta_fast": 32, "finetuned": True}),
        {"rope_parameters.beta_fast", "rope_parameters.finetuned"},
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Mistral-7B-v0.1": (dense("mistral", *MISTRAL, 32000, 32768, sliding_window=4096), ("sliding_window 4096",)),
    "DeepSeek-V3 in fp8": (deepseek(quantization_config={"quant_method": "fp8"}), ("stored in fp8",)),
    "Qwen2.5-7B-Instruct-AWQ": (
        qwen2(3584, 18944, 28, 28, 4, quantization_config={"quant_method": "awq"}),
        ("stored in awq",),
    ),
    "Qwen3-Next-80B-A3B": (moe(model_type="qwen3_next"), ("gated delta networks",)),
    "DeepSeek-V2-Lite": (deepseek(model_type="deepseek_v2"), ("deepseek_v2",)),
    "gemma-2-2b": (dense("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192), ("model_type 'gemma2' is not supported",)),
    "a Llama with Granite's and Gemma's factors": (
        llama(*LLAMA_8B, embedding_multiplier=12.0, logits_scaling=8.0, final_logit_softcapping=30.0),
        ("embedding_multiplier = 12.0", "logits_scaling = 8.0", "final_logit_softcapping = 30.0"),
    ),
    "a Llama with half of each head rotated": (llama(*LLAMA_8B, partial_rotary_factor=0.5), ("partial_rotary_factor",)),
    "the same in transformers 5": (
        llama(*LLAMA_8B, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("partial_rotary_factor is 0.5",),
    ),
    "a Qwen3 without norms on heads": (qwen3(1024, 3072, 28, 16, 8, use_qk_norm=False), ("use_qk_norm is False",)),
    "a Qwen3-MoE with a shared expert": (moe(shared_expert_intermediate_size=512), ("shared_expert_",)),
    "a Qwen3-MoE that counts twice": (moe(num_local_experts=64), ("num_local_experts is 64 and num_experts is 128",)),
    "a Llama with windows": (llama(*LLAMA_8B, layer_types=["sliding_attention"] * 32), ("layer_types = ['slid",)),
    "a Llama with pruned heads": (llama(*LLAMA_8B, pruned_heads={"1": [0]}), ("pruned_heads = {'1': [0]}",)),
    "Phi-3.5's long rope on Llama": (llama(*LLAMA_8B, rope_scaling={"type": "longrope"}), ("rope scaling 'longrope'",)),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSED)
def test_a_published_config_passes_without_a_word(name: str) -> None:
    assert architecture(PASSED[name]).unread == ()


@pytest.mark.parametrize("name", NOTED)
def test_fields_that_nothing_reads_are_noted_and_change_nothing(name: str) -> None:
    config, noted = NOTED[name]
    model = architecture(config)
    assert noted <= set(model.unread)
    outer = {key: value for key, value in config.items() if key not in model.unread}
    assert architecture(outer) == model


@pytest.mark.parametrize("name", REFUSED)
def test_all_fields_that_would_change_the_model_are_refused_in_one_sentence(name: str) -> None:
    config, sentences = REFUSED[name]
    with pytest.raises(UserError) as refused:
        architecture(config)
    assert all(sentence in str(refused.value) for sentence in sentences)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(CLASSES)))
def test_the_table_of_fields_is_that_of_the_installed_transformers(family: str) -> None:
    """A new version that declares or reads another field is noticed; write the table anew and honour the field."""
    assert json.loads(FIELDS_OF_CLASSES.read_text())[family] == table()[family]


def test_a_field_that_a_later_class_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mugrpo_megatron.weights import config

    monkeypatch.setattr(config, "class_fields", lambda family: frozenset({"attention_sink", "zeta"}))
    with pytest.raises(UserError, match=r"attention_sink = True, zeta = 3: the learner does not build this"):
        architecture(llama(*LLAMA_8B, attention_sink=True, zeta=3, note="x"))
    assert architecture(llama(*LLAMA_8B, attention_sink=False, note="x")).unread == ("note",)
