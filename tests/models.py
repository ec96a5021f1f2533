"""The one maker of random models for tests and benches: checkpoints of every family, as transformers writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attention_dropout": 0.0,
}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
}
"""With fields that SGLang needs and transformers does not know (`checks.engines.UNWRITTEN`)."""
DELTA = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": [*3 * ["linear_attention"], "full_attention"],
    "full_attention_interval": 4,
}
"""With the interval, which SGLang reads and transformers writes only where it is given beside `layer_types`."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {"head_dim": 8},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 64, "norm_topk_prob": True, **ROUTED},
    "mixtral": {**ROUTED},
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        **LATENT,
    },
    "glm4_moe": {
        "attention_bias": True,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe_lite": {**LATENT, "first_k_dense_replace": 1, "v_head_dim": 24, "rms_norm_eps": 1e-6},
    "qwen3_5_text": {**DELTA},
    "qwen3_5_moe_text": {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **DELTA,
    },
}


@dataclass(frozen=True)
class Storage:
    """How a checkpoint is drawn and stored."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    """Where its random numbers are drawn."""
    shard_size: str = "5GB"
    """The largest file of its weights."""


IN_FLOAT32 = Storage()


def save_model(
    directory: Path,
    family: str = "qwen2",
    storage: Storage = IN_FLOAT32,
    /,
    *,
    seed: int = 0,
    scale: float | None = 6.0,
    **config: Any,
) -> PreTrainedModel:
    """Write a random checkpoint of the family and return the model; `config` overrides `SIZES` and `FAMILIES`.

    scale: factor of the initial weights, which makes next-token distributions far from uniform; norms and biases are
    moved from their initial ones and zeros, which any mix-up would preserve. None keeps transformers' initialisation.
    """
    settings = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family], **config})
    torch.manual_seed(seed)
    with torch.device(storage.device):
        model = AutoModelForCausalLM.from_config(settings, dtype=storage.dtype, attn_implementation="eager").cpu()
    if scale is not None:
        _randomise(model, scale)
    model.save_pretrained(directory, max_shard_size=storage.shard_size)
    return model.eval()


@torch.no_grad()
def _randomise(model: PreTrainedModel, scale: float) -> None:
    # Norms that multiply by 1 + weight, but for that of a gated delta network.
    centred = model.config.model_type.startswith("qwen3_5")
    for name, parameter in model.named_parameters():
        if "norm" in name and centred and ".linear_attn." not in name:
            parameter.copy_(0.1 * torch.randn_like(parameter))
        elif name.endswith("A_log"):
            parameter.copy_(torch.randn_like(parameter))
        elif "norm" in name:
            parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
        elif name.endswith("bias"):
            parameter.copy_(0.1 * torch.randn_like(parameter))
        else:
            parameter.mul_(scale)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn_like(buffer))
