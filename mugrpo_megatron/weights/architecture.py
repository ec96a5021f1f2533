"""What a `config.json` describes, in Megatron's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from mugrpo_megatron.weights.blocks import Row


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding; `rope.frequencies` computes its radians per token."""

    kind: Literal["default", "linear", "llama3", "yarn"]
    base: float
    dim: int
    """Dimension of a head."""
    settings: tuple[Any, ...] = ()
    """Further arguments of this kind's function in `rope`, after base and dim."""
    attention_factor: float = 1.0
    """Factor of cos and sin (YaRN)."""


@dataclass(frozen=True)
class Architecture:
    """A model's shape: enough to build it in Megatron and to name every tensor of its Hugging Face checkpoint."""

    family: str
    """`model_type` of the config."""
    table: tuple[Row, ...]
    transformer: Mapping[str, Any]
    """Keyword arguments of `TransformerConfig` that the model determines; the learner adds layout and precision."""
    gpt: Mapping[str, Any]
    """Keyword arguments of `GPTModel`; `vocab_size` is the checkpoint's, the learner pads it."""
    rope: Rope

    @property
    def vocab_size(self) -> int:
        return self.gpt["vocab_size"]

    @property
    def tied(self) -> bool:
        """The output layer shares the embedding's weight and has no tensor of its own."""
        return self.gpt["share_embeddings_and_output_weights"]

    @property
    def layers(self) -> int:
        return self.transformer["num_layers"]

    @property
    def experts(self) -> int:
        """Routed experts of each layer; 0 for a dense model."""
        return self.transformer.get("num_moe_experts", 0)

    @property
    def qk_layernorm(self) -> bool:
        return self.transformer["qk_layernorm"]

    @cached_property
    def letters(self) -> dict[str, int]:
        """Sizes for the letters in a row's shapes."""
        head_dim = self.transformer["kv_channels"]
        return {
            "V": self.vocab_size,
            "H": self.transformer["hidden_size"],
            "F": self.transformer["ffn_hidden_size"],
            "M": self.transformer.get("moe_ffn_hidden_size", 0),
            "Q": self.transformer["num_attention_heads"] * head_dim,
            "K": self.transformer["num_query_groups"] * head_dim,
            "D": head_dim,
            "E": self.experts,
        }

    def shape(self, letters: str) -> tuple[int, ...]:
        """The sizes of a row's shape, e.g. "Q H"."""
        return tuple(self.letters[letter] for letter in letters.split())
