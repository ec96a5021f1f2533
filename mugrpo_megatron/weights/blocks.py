"""The rows of a family's table: a Megatron parameter, the Hugging Face tensors it holds, and how they merge.

Shapes are written in letters that an `Architecture` resolves: V vocabulary, H hidden, F feed-forward, M expert
feed-forward, S shared experts' feed-forward, Q heads x head_dim, K key/value heads x head_dim, D head_dim, E experts.
Latent attention has C the queries' rank, L the keys' and values', P the latter with the rotary dimensions, U heads x
(key without rotary dimensions + value), O heads x value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Form = Literal["copy", "vocab", "qkv", "gated", "stacked"]
Layers = Literal["all", "dense", "routed"]
Split = Literal["none", "rows", "columns"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the two-way table."""

    megatron: str
    """Parameter of the whole model: `{layer}` and `{expert}` are numbered over all pipeline stages and ranks."""
    hf: tuple[tuple[str, str], ...]
    """(name, shape in letters) of the Hugging Face tensors, in the order in which they merge."""
    form: Form = "copy"
    """`copy`: the same tensor; `vocab`: padded at the end; `qkv`: [group][heads of q, k, v]; `gated`: [gate; up];
    `stacked`: one tensor above the other."""
    split: Split = "none"
    """Dimension that tensor parallelism shards: `rows` is 0, `columns` is 1."""
    layers: Layers = "all"
    """Layers that have it, of a model in which only some have routed experts."""
    frozen: bool = False
    """A buffer in float32 that training leaves as it is."""


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


def shared_experts(block: str) -> tuple[Row, ...]:
    """Experts that every token goes through, as one feed-forward of their width: `{block}.shared_experts`."""
    of_layer = "model.layers.{layer}." + block + ".shared_experts."
    return (
        Row(
            "decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight",
            ((of_layer + "gate_proj.weight", "S H"), (of_layer + "up_proj.weight", "S H")),
            form="gated",
            split="rows",
        ),
        Row(
            "decoder.layers.{layer}.mlp.shared_experts.linear_fc2.weight",
            ((of_layer + "down_proj.weight", "H S"),),
            split="columns",
        ),
    )


ROUTER_BIAS = (
    Row(
        "decoder.layers.{layer}.mlp.router.expert_bias",
        (("model.layers.{layer}.mlp.gate.e_score_correction_bias", "E"),),
        frozen=True,
    ),
)
"""What a sigmoid router adds to its scores to choose experts, and to nothing else (arXiv 2408.15664)."""


def in_layers(layers: Layers, rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows, of these layers only."""
    return tuple(replace(row, layers=layers) for row in rows)


def latent_trunk(compressed: bool) -> tuple[Row, ...]:
    """`TRUNK` with multi-head latent attention (arXiv 2405.04434, section 2.1); `compressed`: the queries too.

    Both projections to latents are one parameter then: SGLang fuses them while it loads and needs both at a time.
    """
    ours, theirs = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."
    latent = (theirs + "kv_a_proj_with_mqa.weight", "P H")
    queries: tuple[Row, ...]
    if compressed:
        queries = (
            Row(
                ours + "linear_qkv_down_proj.weight",
                ((theirs + "q_a_proj.weight", "C H"), latent),
                form="stacked",
            ),
            Row(ours + "q_layernorm.weight", ((theirs + "q_a_layernorm.weight", "C"),)),
            Row(ours + "linear_q_up_proj.weight", ((theirs + "q_b_proj.weight", "Q C"),), split="rows"),
        )
    else:
        queries = (
            Row(ours + "linear_kv_down_proj.weight", (latent,)),
            Row(ours + "linear_q_proj.weight", ((theirs + "q_proj.weight", "Q H"),), split="rows"),
        )
    attention = (
        *queries,
        Row(ours + "kv_layernorm.weight", ((theirs + "kv_a_layernorm.weight", "L"),)),
        Row(ours + "linear_kv_up_proj.weight", ((theirs + "kv_b_proj.weight", "U L"),), split="rows"),
        Row(ours + "linear_proj.weight", ((theirs + "o_proj.weight", "H O"),), split="columns"),
    )
    others = [row for row in TRUNK if ".self_attention." not in row.megatron]
    norm = next(place for place, row in enumerate(others) if ".input_layernorm." in row.megatron)
    return (*others[: norm + 1], *attention, *others[norm + 1 :])
