"""The rows of a family's table: a Megatron parameter, the Hugging Face tensors it holds, and how they merge.

Shapes are written in letters that an `Architecture` resolves: V vocabulary, H hidden, F feed-forward, M expert
feed-forward, Q heads x head_dim, K key/value heads x head_dim, D head_dim, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["copy", "vocab", "qkv", "gated"]
Split = Literal["none", "rows", "columns"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the two-way table."""

    megatron: str
    """Parameter of the whole model: `{layer}` and `{expert}` are numbered over all pipeline stages and ranks."""
    hf: tuple[tuple[str, str], ...]
    """(name, shape in letters) of the Hugging Face tensors, in the order in which they merge."""
    form: Form = "copy"
    """`copy`: the same tensor; `vocab`: padded at the end; `qkv`: [group][heads of q, k, v]; `gated`: [gate; up]."""
    split: Split = "none"
    """Dimension that tensor parallelism shards: `rows` is 0, `columns` is 1."""


TRUNK = (
    Row(
        "embedding.word_embeddings.weight",
        (("model.embed_tokens.weight", "V H"),),
        form="vocab",
        split="rows",
    ),
    Row(
        "decoder.layers.{layer}.input_layernorm.weight",
        (("model.layers.{layer}.input_layernorm.weight", "H"),),
    ),
    Row(
        "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        (
            ("model.layers.{layer}.self_attn.q_proj.weight", "Q H"),
            ("model.layers.{layer}.self_attn.k_proj.weight", "K H"),
            ("model.layers.{layer}.self_attn.v_proj.weight", "K H"),
        ),
        form="qkv",
        split="rows",
    ),
    Row(
        "decoder.layers.{layer}.self_attention.linear_proj.weight",
        (("model.layers.{layer}.self_attn.o_proj.weight", "H Q"),),
        split="columns",
    ),
    Row(
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        (("model.layers.{layer}.post_attention_layernorm.weight", "H"),),
    ),
    Row(
        "decoder.final_layernorm.weight",
        (("model.norm.weight", "H"),),
    ),
    Row(
        "output_layer.weight",
        (("lm_head.weight", "V H"),),
        form="vocab",
        split="rows",
    ),
)
"""Rows that every decoder has: embedding, norms, attention projections, output layer."""

QKV_BIAS = (
    Row(
        "decoder.layers.{layer}.self_attention.linear_qkv.bias",
        (
            ("model.layers.{layer}.self_attn.q_proj.bias", "Q"),
            ("model.layers.{layer}.self_attn.k_proj.bias", "K"),
            ("model.layers.{layer}.self_attn.v_proj.bias", "K"),
        ),
        form="qkv",
        split="rows",
    ),
)

QK_NORM = (
    Row(
        "decoder.layers.{layer}.self_attention.q_layernorm.weight",
        (("model.layers.{layer}.self_attn.q_norm.weight", "D"),),
    ),
    Row(
        "decoder.layers.{layer}.self_attention.k_layernorm.weight",
        (("model.layers.{layer}.self_attn.k_norm.weight", "D"),),
    ),
)

GATED_MLP = (
    Row(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        (
            ("model.layers.{layer}.mlp.gate_proj.weight", "F H"),
            ("model.layers.{layer}.mlp.up_proj.weight", "F H"),
        ),
        form="gated",
        split="rows",
    ),
    Row(
        "decoder.layers.{layer}.mlp.linear_fc2.weight",
        (("model.layers.{layer}.mlp.down_proj.weight", "H F"),),
        split="columns",
    ),
)


def experts(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """A router and its gated experts, under the family's names: `{block}.experts.{expert}.{gate}`."""
    of_layer = "model.layers.{layer}." + block
    of_expert = of_layer + ".experts.{expert}."
    return (
        Row(
            "decoder.layers.{layer}.mlp.router.weight",
            ((of_layer + ".gate.weight", "E H"),),
        ),
        Row(
            "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
            ((of_expert + gate + ".weight", "M H"), (of_expert + up + ".weight", "M H")),
            form="gated",
            split="rows",
        ),
        Row(
            "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight",
            ((of_expert + down + ".weight", "H M"),),
            split="columns",
        ),
    )
