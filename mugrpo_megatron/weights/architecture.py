"""The sizes and settings of the model that a `config.json` describes, as Megatron takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mugrpo_megatron.weights.blocks import Row


@dataclass(frozen=True)
class Rope:
    """Settings of a rotary position embedding; `learner.operators.frequencies` computes its frequencies from them."""

    kind: Literal["default", "linear", "llama3", "yarn"]
    base: float
    dim: int
    """Rotated dimensions of a head."""
    settings: tuple[Any, ...] = ()
    """Further arguments of this kind's function in `learner.operators`, after base and dim."""
    attention_factor: float = 1.0
    """Factor by which YaRN multiplies cos and sin. The learner multiplies the scores by its square instead."""
    score_factor: float = 1.0
    """The factor of the scores of latent attention is the square of this number (YaRN). Latent attention needs it
    because cos and sin reach only some dimensions of a head."""


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    query: int
    """Size of the latent that queries are projected through; 0 if they have none."""
    key_value: int
    """Size of the latent that keys and values are projected through; an engine caches it."""
    plain: int
    """Dimensions of a query's and a key's head that are not rotated."""
    rotary: int
    """Rotated dimensions of a head; the key's are shared by all heads."""
    value: int
    """Dimensions of a value's head."""

    @property
    def head(self) -> int:
        """Dimensions of a query's and a key's head."""
        return self.plain + self.rotary

    @property
    def cached(self) -> int:
        """Number of values that an engine caches for one token in one layer."""
        return self.key_value + self.rotary


@dataclass(frozen=True)
class Delta:
    """Sizes of gated delta networks (arXiv 2412.06464), which replace attention in some layers."""

    key_heads: int
    value_heads: int
    key: int
    """Dimensions of a query's and a key's head."""
    value: int
    """Dimensions of a value's head."""
    kernel: int
    """Number of tokens that the causal convolution sees."""
    linear_layers: tuple[bool, ...]
    """For each layer, whether it has a gated delta network; all other layers have attention."""

    @property
    def keys(self) -> int:
        """Dimensions of the keys of all heads."""
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        """Dimensions of the values of all heads."""
        return self.value_heads * self.value

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> int:
        """Number of float32 values in the state of one sequence in one layer."""
        return self.value_heads * self.key * self.value


def stage_layers(layers: int, stages: int) -> list[int]:
    """The number of layers of each pipeline stage, in order.

    If `stages` does not divide `layers`, the first stages have one more than the others.
    """
    # The first stages get the additional layers, because the last stage also has the output layer and the loss.
    base, remainder = divmod(layers, stages)
    return [base + (stage < remainder) for stage in range(stages)]


@dataclass(frozen=True)
class Architecture:
    """A model without its weights: enough to build it in Megatron, and to name the tensors of its checkpoint."""

    family: str
    """`model_type` of the config."""
    table: tuple[Row, ...]
    transformer: Mapping[str, Any]
    """Keyword arguments of `TransformerConfig` that the model determines; the learner adds layout and precision."""
    gpt: Mapping[str, Any]
    """Keyword arguments of `GPTModel`; `vocab_size` is the checkpoint's, the learner pads it."""
    rope: Rope
    latent: Latent | None = None
    """Sizes of latent attention; None if keys and values are not compressed."""
    delta: Delta | None = None
    """Sizes of gated delta networks; None if every layer has attention."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Fields of the config that change nothing: transformers' class of the model does not know them, and SGLang ignores
    them or computes the same without them."""
    remarks: tuple[str, ...] = field(default=(), compare=False)
    """Remarks about fields that transformers and SGLang read differently."""

    @property
    def summary(self) -> str:
        """One line of text with the model's family and size."""
        experts = f", {self.experts} experts" if self.experts else ""
        return f"model: {self.family}, {self.layers} layers, hidden size {self.letters['H']}{experts}"

    @property
    def note(self) -> str:
        """A line of text with `remarks` and the names in `unread`; empty if there are neither."""
        names = ", ".join(self.unread)
        unread = [f"fields that change nothing in transformers or in SGLang: {names}"] if names else []
        return f"model: {'; '.join((*self.remarks, *unread))}" if self.remarks or unread else ""

    @property
    def vocab_size(self) -> int:
        return self.gpt["vocab_size"]

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weight and has no tensor of its own."""
        return self.gpt["share_embeddings_and_output_weights"]

    @property
    def layers(self) -> int:
        return self.transformer["num_layers"]

    @property
    def experts(self) -> int:
        """Number of routed experts of a sparse layer; 0 for a dense model."""
        return self.transformer.get("num_moe_experts", 0)

    @property
    def dense_layers(self) -> int:
        """Number of layers without routed experts; these are the model's first layers."""
        pattern = self.transformer.get("moe_layer_freq", [])
        return pattern.count(0) if self.experts else self.layers

    def has_row(self, row: Row, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has the parameter that `row` describes."""
        if row.layers in ("linear", "full"):
            return (row.layers == "linear") == self.is_linear(layer)
        return row.layers == "all" or (row.layers == "dense") == (layer < self.dense_layers)

    def is_linear(self, layer: int) -> bool:
        """Whether the layer has a gated delta network instead of attention."""
        return self.delta is not None and self.delta.linear_layers[layer]

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention, whose keys and values an engine caches."""
        return sum(not self.is_linear(layer) for layer in range(self.layers))

    @property
    def qk_layernorm(self) -> bool:
        return self.transformer["qk_layernorm"]

    @cached_property
    def letters(self) -> dict[str, int]:
        """The size that each letter in a `Row`'s shapes stands for (`weights.blocks` lists the letters)."""
        head_dim, heads = self.transformer["kv_channels"], self.transformer["num_attention_heads"]
        if self.latent:
            return self._other_letters | {
                "Q": heads * self.latent.head,
                "C": self.latent.query,
                "L": self.latent.key_value,
                "P": self.latent.cached,
                "U": heads * (self.latent.plain + self.latent.value),
                "O": heads * self.latent.value,
            }
        gated_queries = {"G": 2 * heads * head_dim} if self.transformer.get("attention_output_gate") else {}
        return (
            self._other_letters
            | gated_queries
            | {
                "Q": heads * head_dim,
                "K": self.transformer["num_query_groups"] * head_dim,
                "D": head_dim,
            }
        )

    @property
    def _other_letters(self) -> dict[str, int]:
        shared = self.transformer.get("moe_shared_expert_intermediate_size")
        delta = self.delta
        linear = (
            {
                "B": delta.values,
                "N": delta.value_heads,
                "W": delta.value,
                "X": delta.channels,
                "Y": delta.kernel,
            }
            if delta
            else {}
        )
        return (
            ({"S": shared} if shared else {})
            | linear
            | {
                "1": 1,
                "V": self.vocab_size,
                "H": self.transformer["hidden_size"],
                "F": self.transformer["ffn_hidden_size"],
                "M": self.transformer.get("moe_ffn_hidden_size", 0),
                "E": self.experts,
            }
        )

    def shape(self, letters: str) -> tuple[int, ...]:
        """The shape that `letters`, such as "Q H", stand for in this model."""
        return tuple(self.letters[letter] for letter in letters.split())
