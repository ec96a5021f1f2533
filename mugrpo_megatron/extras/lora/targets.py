"""Which layers get an adapter, and what an adapter's tensors are called and shaped. No torch is imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.blocks import Row

Targets = Literal["all-linear"] | Sequence[str]
PREFIX = "base_model.model."
"""PEFT's, before the name of a module of transformers' causal model."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A Hugging Face linear layer with an adapter: y = W x + scale B A x."""

    name: str
    """Of its module, as `model.layers.0.self_attn.q_proj`."""
    outputs: int
    inputs: int

    @property
    def a(self) -> str:
        """PEFT's name of A, [rank, inputs]."""
        return f"{PREFIX}{self.name}.lora_A.weight"

    @property
    def b(self) -> str:
        """PEFT's name of B, [outputs, rank]."""
        return f"{PREFIX}{self.name}.lora_B.weight"

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Both tensors' shapes by name."""
        return {self.a: (rank, self.inputs), self.b: (self.outputs, rank)}


def kind(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj`, of its weight, or of the table's template for it."""
    return name.removesuffix(".weight").rpartition(".")[2]


def is_linear(row: Row) -> bool:
    """Whether the row is a layer's matrix that adapters fit: one that tensor parallelism splits, and no expert's."""
    weight = row.megatron.endswith(".weight") and row.split != "none"
    return weight and "{layer}" in row.megatron and "{expert}" not in row.megatron


def linear_kinds(architecture: Architecture) -> tuple[str, ...]:
    """The kinds of layers that may have adapters, in the table's order."""
    return tuple(kind(name) for row in architecture.table if is_linear(row) for name, _ in row.hf)


def target_kinds(architecture: Architecture, targets: Targets, where: str = "lora.targets") -> tuple[str, ...]:
    """The kinds that `targets` name, in the table's order; `where` is what names them.

    Raises UserError for a name that is none, for no names, for all layers of a mixture of experts, and for latent
    attention.
    """
    if architecture.latent:
        raise UserError(
            f"lora: adapters do not fit {architecture.family}, whose latents are projected whole on every rank and "
            "whose layers are of two kinds; leave [lora] out and train the weights"
        )
    known = linear_kinds(architecture)
    if targets == "all-linear":
        if architecture.experts:
            raise UserError(
                f"{where}: experts have no adapters here, and {architecture.family} is a mixture of experts; name "
                f"other layers, as in lora.targets = {list(known)}"
            )
        return known
    if unknown := [name for name in targets if name not in known]:
        raise UserError(
            f"{where}: {architecture.family} has no linear layer {unknown[0]!r} with an adapter; it has {list(known)}"
        )
    if not targets:
        raise UserError(f"{where} names no layer, which leaves nothing to train; name some of {list(known)}")
    return tuple(name for name in known if name in targets)


def leaves_of(row: Row, layer: int, architecture: Architecture) -> list[Leaf]:
    """The Hugging Face layers of a linear row, in the order in which they merge."""
    named = (
        (name.format(layer=layer).removesuffix(".weight"), architecture.shape(letters)) for name, letters in row.hf
    )
    return [Leaf(name, outputs, inputs) for name, (outputs, inputs) in named]


def adapter_parameters(architecture: Architecture, rank: int, targets: Targets, layers: int, tensor: int = 1) -> int:
    """Parameters of the adapters of `layers` layers on one of `tensor` ranks: one factor is divided, one is whole."""
    kinds, numel = target_kinds(architecture, targets), 0
    for row in filter(is_linear, architecture.table):
        for leaf in leaves_of(row, 0, architecture):
            divided, whole = (leaf.outputs, leaf.inputs) if row.split == "rows" else (leaf.inputs, leaf.outputs)
            numel += rank * (divided // tensor + whole) * (kind(leaf.name) in kinds)
    return layers * numel


def adapted_leaves(architecture: Architecture, kinds: Sequence[str]) -> Iterator[Leaf]:
    """Every layer of the whole model with an adapter, in the model's order."""
    rows = [row for row in architecture.table if is_linear(row)]
    for layer in range(architecture.layers):
        for row in rows:
            yield from (leaf for leaf in leaves_of(row, layer, architecture) if kind(leaf.name) in kinds)
