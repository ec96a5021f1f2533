"""The model families: how each one's Hugging Face config becomes an `Architecture`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import CONFIG, checked, read_config
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.blocks import GATED_MLP, QK_NORM, QKV_BIAS, TRUNK, experts
from mugrpo_megatron.weights.config import Fields, decoder, routing


def _llama(fields: Fields) -> Architecture:
    """Llama 2 and 3, and models of the same shape: DeepSeek-LLM, DeepSeekMath 7B, the R1 distills on Llama.

    Config of transformers' `LlamaForCausalLM`.
    """
    fields.only("attention_bias", (False,), False)
    fields.only("mlp_bias", (False,), False)
    return decoder(fields, family="llama", table=TRUNK + GATED_MLP)


def _mistral(fields: Fields) -> Architecture:
    """Mistral 7B and later models of the same shape, without a sliding window.

    Config of transformers' `MistralForCausalLM`.
    """
    fields.no_window(absent=4096)
    return decoder(fields, family="mistral", table=TRUNK + GATED_MLP)


def _mixtral(fields: Fields) -> Architecture:
    """Mixtral: Mistral's attention, every layer with routed experts, whose weights are renormalised.

    Config of transformers' `MixtralForCausalLM`.
    """
    fields.no_window(absent=None)
    fields.only("router_jitter_noise", (0.0,), 0.0)
    routed = routing(fields, ffn=fields.size("intermediate_size"), renormalised=True)
    return decoder(
        fields,
        family="mixtral",
        table=TRUNK + experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        **routed,
    )


def _qwen2(fields: Fields) -> Architecture:
    """Qwen2 and Qwen2.5, including Math and Coder: biases on q, k and v.

    Config of transformers' `Qwen2ForCausalLM`.
    """
    fields.full_attention()
    return decoder(fields, family="qwen2", table=TRUNK + QKV_BIAS + GATED_MLP, add_qkv_bias=True)


def _qwen3(fields: Fields) -> Architecture:
    """Qwen3, dense: RMSNorm on each head of q and k, head_dim independent of hidden/heads.

    Config of transformers' `Qwen3ForCausalLM`.
    """
    fields.full_attention()
    fields.only("attention_bias", (False,), False)
    return decoder(fields, family="qwen3", table=TRUNK + QK_NORM + GATED_MLP, head_dim=128, qk_layernorm=True)


def _qwen3_moe(fields: Fields) -> Architecture:
    """Qwen3 mixture of experts: Qwen3's attention, every layer with routed experts, no shared expert.

    Config of transformers' `Qwen3MoeForCausalLM`.
    """
    fields.full_attention()
    fields.only("attention_bias", (False,), False)
    fields.only("decoder_sparse_step", (1,), 1)
    fields.only("mlp_only_layers", ([],), [])
    fields.take("intermediate_size", 0)  # of dense layers, which this model does not have
    routed = routing(
        fields, ffn=fields.size("moe_intermediate_size"), renormalised=fields.take("norm_topk_prob", False)
    )
    return decoder(
        fields,
        family="qwen3_moe",
        table=TRUNK + QK_NORM + experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        qk_layernorm=True,
        **routed,
    )


FAMILIES = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""`model_type` -> the function that reads the family's config."""


def architecture(config: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """The architecture that a Hugging Face config describes.

    Raises UserError for a family that has no table, and for any field that is missing, malformed or unknown.
    """
    family = checked(config, where)["model_type"]
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{where}: model_type {family!r} is not supported; the supported families are {known}")
    return FAMILIES[family](Fields(config, where))


def read_architecture(directory: Path) -> Architecture:
    """`architecture` of the config.json in a checkpoint directory."""
    return architecture(read_config(directory), str(directory / CONFIG))


@dataclass(frozen=True, slots=True)
class Work:
    """Forward FLOP of one token: 2 for each weight that it is multiplied with."""

    layers: float
    attention: float
    """Scores and weighted values over the tokens before it, on average."""
    head: float
    """One product with the output weight; the learner computes it for trained tokens only."""


def work_of(architecture: Architecture, sequence: float) -> Work:
    """Per token of sequences of `sequence` tokens on average."""
    size, layers = architecture.letters, architecture.layers
    feed_forward = 3 * size["H"] * size["F"]
    if architecture.experts:
        chosen = architecture.transformer["moe_router_topk"]
        feed_forward = 3 * size["H"] * size["M"] * chosen + size["H"] * size["E"]
    attention = size["H"] * (size["Q"] + 2 * size["K"]) + size["Q"] * size["H"]
    return Work(
        layers=2.0 * layers * (attention + feed_forward),
        attention=2.0 * layers * 2 * size["Q"] * sequence / 2,
        head=2.0 * size["V"] * size["H"],
    )


def model_flops(architecture: Architecture, lengths: Sequence[int], trained: int) -> float:
    """FLOP that an update of the model needs at least: forward once, backward twice that.

    As in "model FLOPs utilization" (arXiv 2204.02311, appendix B): what is computed again for memory's sake, padding
    and extra passes do not count. Attention is counted as causal, half of the full square.

    Args:
        lengths: tokens of each sequence, the prompt included.
        trained: tokens with a loss, whose logits are computed.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    work = work_of(architecture, 1.0)
    return 3.0 * float(work.layers * tokens.sum() + work.attention * np.square(tokens).sum() + work.head * trained)


BLOCKS = 64
BLOCK_BYTES = 4096


def fingerprint(directory: Path) -> str:
    """SHA-256 of the safetensors files' names, sizes, first bytes and 64 blocks spread evenly over each.

    Training changes every tensor, so weights of another training step differ in some of the blocks. Milliseconds for
    a checkpoint of any size.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * max(size - BLOCK_BYTES, 0) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
