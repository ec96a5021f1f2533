"""The text models of Qwen3.5 and 3.6: gated delta networks (arXiv 2412.06464) in most layers, attention in the others.

Names and shapes follow transformers' `qwen3_5` and Megatron's `GatedDeltaNet`.
"""

from __future__ import annotations

from typing import Any

from mugrpo_megatron.weights.architecture import Architecture, Delta
from mugrpo_megatron.weights.blocks import (
    GATED_MLP,
    OURS,
    QK_NORM,
    THEIRS,
    Row,
    experts,
    gated,
    in_layers,
    with_attention,
)
from mugrpo_megatron.weights.config import Fields, decoder, routing

KINDS = ("linear_attention", "full_attention")


def qwen3_5_text(fields: Fields) -> Architecture:
    """The dense models of Qwen3.5, without the vision tower."""
    return _hybrid(fields, "qwen3_5_text", GATED_MLP)


def qwen3_5_moe_text(fields: Fields) -> Architecture:
    """The mixtures of experts of Qwen3.5: a renormalised softmax router, and a shared expert with a gate."""
    # This field is not used: it is the width of dense layers, which these models do not have.
    fields.take("intermediate_size", 0)
    fields.only("norm_topk_prob", (True,), True)
    fields.only("decoder_sparse_step", (1,), 1)
    routed = routing(fields, ffn=fields.size("moe_intermediate_size"), renormalised=True)
    shared = THEIRS + "mlp.shared_expert"
    rows = (
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *gated(OURS + "mlp.shared_experts", f"{shared}.gate_proj", f"{shared}.up_proj", f"{shared}.down_proj", "S"),
        Row(OURS + "mlp.shared_experts.gate_weight", ((f"{shared}_gate.weight", "1 H"),)),
    )
    return _hybrid(
        fields,
        "qwen3_5_moe_text",
        rows,
        moe_shared_expert_intermediate_size=fields.size("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
        **routed,
    )


def _hybrid(fields: Fields, family: str, feed_forward: tuple[Row, ...], **transformer: Any) -> Architecture:
    fields.only("attention_bias", (False,), False)
    fields.only("attn_output_gate", (True,), True)
    fields.only("mlp_only_layers", ([],), [])
    fields.only("mamba_ssm_dtype", ("float32",), "float32")
    # These fields are not used: layers of multi-token prediction are not built.
    for unused in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        fields.take(unused, None)
    sizes = Delta(
        key_heads=fields.take("linear_num_key_heads", 16),
        value_heads=fields.take("linear_num_value_heads", 32),
        key=fields.take("linear_key_head_dim", 128),
        value=fields.take("linear_value_head_dim", 128),
        kernel=fields.take("linear_conv_kernel_dim", 4),
        linear_layers=_linear_layers(fields),
    )
    if sizes.value_heads % sizes.key_heads:
        raise fields.error(
            f"linear_num_value_heads {sizes.value_heads} is not a multiple of linear_num_key_heads {sizes.key_heads}; "
            "correct the wrong one"
        )
    return decoder(
        fields,
        family=family,
        table=_trunk(sizes) + feed_forward,
        head_dim=256,
        rotated=fields.take("partial_rotary_factor", 0.25),
        delta=sizes,
        num_layers=len(sizes.linear_layers),
        qk_layernorm=True,
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        # With this setting distributed checkpoints have a key for each layer, as those of Megatron's own models do.
        linear_attention_freq=[int(linear) for linear in sizes.linear_layers],
        **transformer,
    )


def _linear_layers(fields: Fields) -> tuple[bool, ...]:
    """Read which layers have a gated delta network, from `layer_types` or `full_attention_interval`.

    Without `layer_types`, every layer has one except each `full_attention_interval`-th.
    """
    layers, interval = fields.size("num_hidden_layers"), fields.take("full_attention_interval", 4)
    kinds = fields.take("layer_types", [KINDS[(layer + 1) % interval == 0] for layer in range(layers)])
    if len(kinds) != layers or set(kinds) - set(KINDS):
        raise fields.error(
            f"layer_types names {len(kinds)} of {layers} layers, with the values {sorted(set(map(str, kinds)))}; it "
            f"has to name each layer, as {' or '.join(KINDS)}"
        )
    return tuple(kind == KINDS[0] for kind in kinds)


def _trunk(sizes: Delta) -> tuple[Row, ...]:
    """`blocks.TRUNK` with other attention: a gated delta network, or in full layers attention with an output gate."""
    ours, theirs = OURS + "self_attention.", THEIRS + "self_attn."
    full = (
        Row(
            ours + "linear_qkv.weight",
            ((theirs + "q_proj.weight", "G H"), (theirs + "k_proj.weight", "K H"), (theirs + "v_proj.weight", "K H")),
            form="qkv_gated",
            split="rows",
        ),
        Row(ours + "linear_proj.weight", ((theirs + "o_proj.weight", "H Q"),), split="columns"),
        *QK_NORM,
    )
    theirs = THEIRS + "linear_attn."
    projections = (("qkv", "X"), ("z", "B"), ("b", "N"), ("a", "N"))
    qkv = (("query", sizes.keys), ("key", sizes.keys), ("value", sizes.values))
    linear = (
        Row(ours + "dt_bias", ((theirs + "dt_bias", "N"),), split="rows"),
        Row(ours + "A_log", ((theirs + "A_log", "N"),), split="rows"),
        # The four projections are one parameter, as in Megatron. SGLang fuses them in pairs while it loads a bucket,
        # so that both of a pair must be in the same bucket.
        Row(
            ours + "in_proj.weight",
            tuple((f"{theirs}in_proj_{name}.weight", f"{rows} H") for name, rows in projections),
            form="stacked",
            split="rows",
            sections=(*qkv, ("z", sizes.values), ("beta", sizes.value_heads), ("alpha", sizes.value_heads)),
        ),
        Row(ours + "conv1d.weight", ((theirs + "conv1d.weight", "X 1 Y"),), split="rows", sections=qkv),
        Row(ours + "out_norm.weight", ((theirs + "norm.weight", "W"),)),
        Row(ours + "out_proj.weight", ((theirs + "out_proj.weight", "H B"),), split="columns"),
    )
    return with_attention((*in_layers("full", full), *in_layers("linear", linear)))
