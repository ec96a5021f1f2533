"""The tables of model families: each row names a Megatron parameter, its Hugging Face tensors, and how they merge.

Shapes are written in letters, whose sizes are in `Architecture.letters`:

V vocabulary, H hidden size, F feed-forward size, M feed-forward size of an expert, S of all shared experts, E experts
Q heads x head_dim, K key/value heads x head_dim, D head_dim
latent attention: C the queries' latent, L the latent of keys and values, P = L + rotary dimensions, U heads x
(key without rotary dimensions + value), O heads x value
gated delta networks: B value heads x value, N value heads, W dimensions of a value, X channels and Y tokens of the
convolution; in the layers with attention G heads x (query + gate)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Form = Literal["copy", "vocab", "qkv", "qkv_gated", "gated", "stacked"]
Layers = Literal["all", "dense", "routed", "linear", "full"]
Split = Literal["none", "rows", "columns"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table that maps parameters of Hugging Face checkpoints to Megatron's, and back."""

    megatron: str
    """Name of the parameter; `{layer}` and `{expert}` are numbers in the whole model, over all stages and ranks."""
    hf: tuple[tuple[str, str], ...]
    """(name, shape in letters) of the Hugging Face tensors, in the order in which they merge."""
    form: Form = "copy"
    """How the tensors become the parameter. `copy`: it is the same tensor; `vocab`: rows of padding are added; `qkv`:
    for each group of heads, the rows of q, k and v; `qkv_gated`: the same, with the output gates after q; `gated`: gate
    above up; `stacked`: one tensor above the other."""
    split: Split = "none"
    """Dimension that tensor parallelism shards: `rows` is 0, `columns` is 1."""
    layers: Layers = "all"
    """The layers that have the parameter: `all`; those that are `dense` or have `routed` experts; those with a gated
    delta network (`linear`) or with attention (`full`)."""
    frozen: bool = False
    """Whether the parameter is a float32 buffer that training does not change."""
    sections: tuple[tuple[str, int], ...] = ()
    """(Megatron's name, number of rows) of the sections that the first dimension consists of. A tensor parallel rank
    has a shard of each section, and a distributed checkpoint a tensor of each."""


OURS, THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."
TRUNK = (
    Row("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "V H"),), form="vocab", split="rows"),
    Row(OURS + "input_layernorm.weight", ((THEIRS + "input_layernorm.weight", "H"),)),
    Row(
        OURS + "self_attention.linear_qkv.weight",
        (
            (THEIRS + "self_attn.q_proj.weight", "Q H"),
            (THEIRS + "self_attn.k_proj.weight", "K H"),
            (THEIRS + "self_attn.v_proj.weight", "K H"),
        ),
        form="qkv",
        split="rows",
    ),
    Row(OURS + "self_attention.linear_proj.weight", ((THEIRS + "self_attn.o_proj.weight", "H Q"),), split="columns"),
    Row(OURS + "pre_mlp_layernorm.weight", ((THEIRS + "post_attention_layernorm.weight", "H"),)),
    Row("decoder.final_layernorm.weight", (("model.norm.weight", "H"),)),
    Row("output_layer.weight", (("lm_head.weight", "V H"),), form="vocab", split="rows"),
)
"""Rows that every decoder has: embedding, norms, attention projections, output layer."""

QKV_BIAS = (
    Row(
        OURS + "self_attention.linear_qkv.bias",
        (
            (THEIRS + "self_attn.q_proj.bias", "Q"),
            (THEIRS + "self_attn.k_proj.bias", "K"),
            (THEIRS + "self_attn.v_proj.bias", "K"),
        ),
        form="qkv",
        split="rows",
    ),
)

QK_NORM = tuple(
    Row(OURS + f"self_attention.{head}_layernorm.weight", ((THEIRS + f"self_attn.{head}_norm.weight", "D"),))
    for head in ("q", "k")
)


def gated(ours: str, gate: str, up: str, down: str, width: str) -> tuple[Row, Row]:
    """The rows of a gated feed-forward whose size has the letter `width`.

    `ours` is the name of Megatron's module; `gate`, `up` and `down` are the Hugging Face names of the projections.
    """
    gate_and_up = ((gate + ".weight", f"{width} H"), (up + ".weight", f"{width} H"))
    return (
        Row(ours + ".linear_fc1.weight", gate_and_up, form="gated", split="rows"),
        Row(ours + ".linear_fc2.weight", ((down + ".weight", f"H {width}"),), split="columns"),
    )


MLP = THEIRS + "mlp."
GATED_MLP = gated(OURS + "mlp", MLP + "gate_proj", MLP + "up_proj", MLP + "down_proj", "F")


def experts(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """The rows of a router and its gated experts.

    The family's checkpoints call the experts' projections `{block}.experts.{expert}.` plus `gate`, `up` and `down`.
    """
    theirs = THEIRS + block + ".experts.{expert}."
    return (
        Row(OURS + "mlp.router.weight", ((THEIRS + block + ".gate.weight", "E H"),)),
        *gated(OURS + "mlp.experts.local_experts.{expert}", theirs + gate, theirs + up, theirs + down, "M"),
    )


def shared_experts(block: str) -> tuple[Row, ...]:
    """The rows of `{block}.shared_experts`: one feed-forward that holds all experts that every token is sent to."""
    theirs = THEIRS + block + ".shared_experts."
    return gated(OURS + "mlp.shared_experts", theirs + "gate_proj", theirs + "up_proj", theirs + "down_proj", "S")


ROUTER_BIAS = (Row(OURS + "mlp.router.expert_bias", ((MLP + "gate.e_score_correction_bias", "E"),), frozen=True),)
"""Bias of a sigmoid router's scores, used only to choose experts (arXiv 2408.15664)."""


def in_layers(layers: Layers, rows: Iterable[Row]) -> tuple[Row, ...]:
    """Copies of `rows`, for parameters that only the layers of the kind `layers` have."""
    return tuple(replace(row, layers=layers) for row in rows)


def with_attention(attention: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of `TRUNK` with the rows `attention` in place of its own for attention."""
    others = [row for row in TRUNK if ".self_attention." not in row.megatron]
    norm = next(index for index, row in enumerate(others) if ".input_layernorm." in row.megatron)
    return (*others[: norm + 1], *attention, *others[norm + 1 :])


def latent_trunk(compressed: bool) -> tuple[Row, ...]:
    """The rows of `TRUNK` with multi-head latent attention (arXiv 2405.04434, section 2.1) instead of attention.

    `compressed` says whether queries have a latent too.
    """
    ours, theirs = OURS + "self_attention.", THEIRS + "self_attn."
    latent = (theirs + "kv_a_proj_with_mqa.weight", "P H")
    queries: tuple[Row, ...]
    if compressed:
        # The projections to both latents are one parameter, because SGLang fuses them while it loads a bucket of
        # weights, and needs both in the same bucket.
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
    return with_attention(attention)
