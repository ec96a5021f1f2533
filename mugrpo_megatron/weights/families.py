"""The supported model families. For each, a function reads its Hugging Face config into an `Architecture`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import CONFIG, check_config, read_config
from mugrpo_megatron.weights.architecture import Architecture, Latent
from mugrpo_megatron.weights.blocks import (
    GATED_MLP,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    TRUNK,
    Row,
    experts,
    in_layers,
    latent_trunk,
    shared_experts,
)
from mugrpo_megatron.weights.config import Fields, decoder, routing, sigmoid_routing
from mugrpo_megatron.weights.hybrid import qwen3_5_moe_text, qwen3_5_text


def _llama(fields: Fields) -> Architecture:
    """Llama 2 and 3, and models of the same shape: DeepSeek-LLM, DeepSeekMath 7B, the R1 distills on Llama."""
    fields.only("attention_bias", (False,), False)
    fields.only("mlp_bias", (False,), False)
    return decoder(fields, family="llama", table=TRUNK + GATED_MLP)


def _mistral(fields: Fields) -> Architecture:
    """Mistral 7B and later models of the same shape, without a sliding window."""
    fields.no_window(absent=4096)
    return decoder(fields, family="mistral", table=TRUNK + GATED_MLP)


def _mixtral(fields: Fields) -> Architecture:
    """Mixtral: Mistral's attention, and routed experts in every layer, with renormalised weights."""
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
    """Qwen2 and Qwen2.5, including Math and Coder: biases on q, k and v."""
    fields.full_attention()
    for bias in ("attention_bias", "qkv_bias"):
        fields.only(bias, (True,), True)
    return decoder(fields, family="qwen2", table=TRUNK + QKV_BIAS + GATED_MLP, add_qkv_bias=True)


def _qwen3(fields: Fields) -> Architecture:
    """Qwen3, dense: RMSNorm on each head of q and k, head_dim independent of hidden/heads."""
    fields.full_attention()
    fields.only("attention_bias", (False,), False)
    fields.only("use_qk_norm", (True,), True)
    return decoder(fields, family="qwen3", table=TRUNK + QK_NORM + GATED_MLP, head_dim=128, qk_layernorm=True)


def _qwen3_moe(fields: Fields) -> Architecture:
    """Qwen3's mixtures of experts: Qwen3's attention, routed experts in every layer, no shared expert."""
    fields.full_attention()
    fields.only("attention_bias", (False,), False)
    fields.only("use_qk_norm", (True,), True)
    fields.only("decoder_sparse_step", (1,), 1)
    fields.only("mlp_only_layers", ([],), [])
    # This field is not used: it is the width of dense layers, which this model does not have.
    fields.take("intermediate_size", 0)
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


def _deepseek_v3(fields: Fields) -> Architecture:
    """DeepSeek-V3 and R1, Moonlight, Kimi-K2: latent attention, sigmoid routing, shared experts, first layers dense."""
    return _latent(fields, "deepseek_v3", dense=fields.take("first_k_dense_replace", 3))


def _glm4_moe_lite(fields: Fields) -> Architecture:
    """GLM-4.7-Flash, which has the layers of DeepSeek-V3."""
    fields.only("partial_rotary_factor", (1.0,), 1.0)
    first, kinds = fields.take("first_k_dense_replace", None), fields.take("mlp_layer_types", None)
    dense = 1 if first is None else first
    if kinds is not None:
        dense = kinds.count("dense")
        if first not in (None, dense):
            raise fields.error(
                f"first_k_dense_replace {first} and mlp_layer_types, which has {dense} dense layers, disagree: SGLang "
                "reads the former and transformers the latter; make them agree"
            )
        if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
            raise fields.error(
                "mlp_layer_types has a dense layer after a sparse one; the learner builds only models in which all "
                "dense layers come first"
            )
    return _latent(fields, "glm4_moe_lite", dense)


def _latent(fields: Fields, family: str, dense: int) -> Architecture:
    # These fields are not used: layers of multi-token prediction are not built, and the two sizes follow from others.
    for unused in ("num_nextn_predict_layers", "head_dim", "qk_head_dim"):
        fields.take(unused, None)
    fields.only("attention_bias", (False,), False)
    fields.only("rope_interleave", (True,), True)
    sizes = Latent(
        query=fields.take("q_lora_rank", 0),
        key_value=fields.size("kv_lora_rank"),
        plain=fields.size("qk_nope_head_dim"),
        rotary=fields.size("qk_rope_head_dim"),
        value=fields.size("v_head_dim"),
    )
    # The learner's attention pads values to the size of a query's head (learner.latent).
    if sizes.value > sizes.head:
        raise fields.error(
            f"v_head_dim {sizes.value} is larger than the {sizes.head} dimensions of a query's head, which the "
            "learner's attention does not support"
        )
    routed = sigmoid_routing(fields, dense)
    architecture = decoder(
        fields,
        family=family,
        table=(*latent_trunk(compressed=sizes.query > 0), *_routed_rows(routed)),
        latent=sizes,
        **routed,
    )
    if architecture.rope.kind not in ("default", "yarn") or architecture.rope.attention_factor != 1:
        raise fields.error(
            f"rope scaling {architecture.rope.kind!r}, which multiplies cos and sin by "
            f"{architecture.rope.attention_factor:g}, does not go with latent attention: there the learner supports "
            "only models without rope scaling, or with yarn whose mscale equals mscale_all_dim"
        )
    heads, groups = (architecture.transformer[key] for key in ("num_attention_heads", "num_query_groups"))
    if heads != groups:
        raise fields.error(
            f"num_key_value_heads is {groups} and num_attention_heads {heads}, but latent attention needs equal "
            "numbers; correct the wrong one"
        )
    return architecture


def _glm4_moe(fields: Fields) -> Architecture:
    """GLM-4.5 and 4.5-Air: sigmoid routing, shared experts, first layers dense; half of each head is rotated."""
    fields.take("num_nextn_predict_layers", None)
    rotated = fields.take("partial_rotary_factor", 0.5)
    bias, normed = fields.take("attention_bias", False), fields.take("use_qk_norm", False)
    routed = sigmoid_routing(fields, fields.take("first_k_dense_replace", 1))
    return decoder(
        fields,
        family="glm4_moe",
        table=(*TRUNK, *(QKV_BIAS if bias else ()), *(QK_NORM if normed else ()), *_routed_rows(routed)),
        rotated=rotated,
        add_qkv_bias=bias,
        qk_layernorm=normed,
        **routed,
    )


def _routed_rows(routed: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows of the feed-forward layers, dense and routed, of a model whose routers `sigmoid_routing` has read."""
    shared = shared_experts("mlp") if routed["moe_shared_expert_intermediate_size"] else ()
    return (
        *in_layers("dense", GATED_MLP),
        *in_layers("routed", experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")),
        *in_layers("routed", ROUTER_BIAS + shared),
    )


FAMILIES = {
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "kimi_k2": _deepseek_v3,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_moe": _qwen3_moe,
}
"""`model_type` of a config.json -> the function that reads such a config. These are text models: those that a
`...ForCausalLM` class of transformers loads."""
_SPARSE = "sparse attention (DSA), whose indexer the learner does not have"
_WITH_VISION = "a vision tower; extract its text model, {}, with `mugrpo convert text_of`"
CLOSE = {
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "qwen3_next": "projections of gated delta networks that are grouped by key head; of the later models the family "
    "qwen3_5_moe_text is supported",
    "qwen3_5": _WITH_VISION.format("qwen3_5_text"),
    "qwen3_5_moe": _WITH_VISION.format("qwen3_5_moe_text"),
    "kimi_linear": "linear attention (Kimi Delta Attention), which the learner does not have",
    "deepseek_v2": "a softmax router over groups of experts; of the later models the family deepseek_v3 is supported",
    "gpt_oss": "attention sinks and weights in mxfp4",
}
"""`model_type` of a model that resembles a supported one -> the feature that the learner lacks for it."""


def architecture(config: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """Read a Hugging Face config into the architecture that it describes.

    Raises UserError for a family that has no table, and for fields that are missing, malformed or not supported.
    """
    family = check_config(config, where)["model_type"]
    if family in CLOSE:
        raise UserError(f"{where}: model_type {family!r} is not supported: it needs {CLOSE[family]}")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "a quantised type")
        raise UserError(
            f"{where}: the weights are stored in {method} (quantization_config), and the learner trains bfloat16, "
            "float16 or float32; convert them and remove the field"
        )
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{where}: model_type {family!r} is not supported; the supported families are {known}")
    fields = Fields(config, where)
    try:
        return FAMILIES[family](fields)
    except UserError as error:
        raise fields.error("; ".join(fields.refused)) if fields.refused else error from None


def read_architecture(directory: Path) -> Architecture:
    """The architecture that the config.json of a checkpoint directory describes."""
    return architecture(read_config(directory), str(directory / CONFIG))


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """The FLOP of one token's forward pass: 2 for each weight that it is multiplied with, and those of attention."""

    layers: float
    attention: float
    """FLOP of the scores and of the weighted sum of values, on average over the positions of a sequence."""
    head: float
    """FLOP of the product with the output weight, which the learner computes for trained tokens only."""


def token_flops(architecture: Architecture, sequence: float) -> TokenFlops:
    """The FLOP of a token's forward pass, averaged over the positions of a sequence of `sequence` tokens."""
    size, layers, dense = architecture.letters, architecture.layers, architecture.dense_layers
    feed_forward = dense * 3 * size["H"] * size["F"]
    if architecture.experts:
        width = size["M"] * architecture.transformer["moe_router_topk"] + size.get("S", 0)
        feed_forward += (layers - dense) * (3 * size["H"] * width + size["H"] * size["E"])
    if architecture.latent:
        queries = (size["H"] + size["Q"]) * size["C"] if size["C"] else size["H"] * size["Q"]
        attention = queries + size["H"] * size["P"] + size["L"] * size["U"] + size["O"] * size["H"]
        scored = size["Q"] + size["O"]
    else:
        attention = size["H"] * (size.get("G", size["Q"]) + 2 * size["K"]) + size["Q"] * size["H"]
        scored = 2 * size["Q"]
    full, linear = architecture.attention_layers, 0
    if delta := architecture.delta:
        # A token's key reads the state, its value is written into it, and its query reads it: three products.
        rule = delta.channels * delta.kernel + 3 * delta.state
        linear = size["H"] * (delta.channels + 2 * (delta.values + delta.value_heads)) + rule
    return TokenFlops(
        layers=2.0 * (full * attention + (layers - full) * linear + feed_forward),
        attention=2.0 * full * scored * sequence / 2,
        head=2.0 * size["V"] * size["H"],
    )


def model_flops(architecture: Architecture, lengths: Sequence[int], trained: int) -> float:
    """The FLOP of an update on sequences of `lengths` tokens: those of a forward pass, and twice as many for backward.

    As in "model FLOPs utilization" (arXiv 2204.02311, appendix B): recomputation, padding and extra passes do not
    count. Attention is counted as causal, half of the full square.

    Args:
        lengths: tokens of each sequence, the prompt included.
        trained: number of tokens with a loss, whose logits are computed.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    work = token_flops(architecture, 1.0)
    return 3.0 * float(work.layers * tokens.sum() + work.attention * np.square(tokens).sum() + work.head * trained)


BLOCKS = 64
BLOCK_BYTES = 4096


def fingerprint(directory: Path) -> str:
    """A SHA-256 that tells a checkpoint's weights from those of another checkpoint.

    It covers the names and sizes of the safetensors files, and 64 blocks spread evenly over each file.
    """
    # Reading some blocks takes milliseconds, and suffices: training changes most tensors, so it changes some blocks.
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * max(size - BLOCK_BYTES, 0) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
