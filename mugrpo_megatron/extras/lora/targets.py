"""Which layers have adapters, and the names and shapes of their tensors. No torch is imported.

PEFT 0.21.2 has one pair of factors A and B for each linear layer. Transformers keeps the matrices of a layer's routed
experts in two parameters, `gate_up_proj` and `down_proj`; PEFT has one pair for each of these, with every expert's own
part in it (`tuners/lora/layer.py`, `ParamWrapper`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.blocks import Row

if TYPE_CHECKING:
    import torch

Targets = Literal["all-linear"] | Sequence[str]
PREFIX = "base_model.model."
"""What PEFT writes before the name of a module of transformers' causal model."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of the two parameters in which transformers keeps a layer's experts."""
EXPERTS = "mlp.experts"
"""Transformers' name of a layer's experts, in every family."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A linear layer of a Hugging Face model that may have an adapter, y = W x + scale B A x. For routed experts, it is
    the same layer of all experts together."""

    name: str
    """PEFT's name of the module, such as `model.layers.0.self_attn.q_proj`."""
    kind: str
    """Kind of the layer, as `lora.targets` names it: `q_proj`."""
    outputs: int
    inputs: int
    experts: int = 0
    """Number of routed experts whose layers it has; 0 for a layer that is no expert's."""
    tensors: int = 1
    """Number of tensors of a Hugging Face checkpoint in one layer, one above the other: 2 for an expert's gate and up
    projections."""

    @property
    def a(self) -> str:
        """PEFT's name of A, [rank, inputs]; of experts [experts * rank, inputs]."""
        return f"{PREFIX}{self.name}.lora_A.weight"

    @property
    def b(self) -> str:
        """PEFT's name of B, [outputs, rank]; of experts [outputs, rank * experts], where the expert varies fastest."""
        return f"{PREFIX}{self.name}.lora_B.weight"

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        columns = rank * max(1, self.experts)
        return {self.a: (columns, self.inputs), self.b: (self.outputs, columns)}

    def of_expert(self, a: torch.Tensor, b: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, inputs] and B [outputs, rank] of one expert, as views of PEFT's tensors `a` and `b`.

        A layer without experts gets `a` and `b` themselves.
        """
        if not self.experts:
            return a, b
        return a.view(self.experts, -1, self.inputs)[expert], b.view(self.outputs, -1, self.experts)[..., expert]

    def named(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """PEFT's tensors by name, made of the learner's whole factors `a` and `b`. In those of experts, the first
        dimension is the expert."""
        if not self.experts:
            return {self.a: a, self.b: b}
        return {self.a: a.flatten(0, 1), self.b: b.flatten(1, -2).permute(1, 2, 0).flatten(1)}

    def shape_of_b(self, outputs: int, rank: int) -> tuple[int, ...]:
        """Shape of the learner's B for `outputs` rows. If a layer has several tensors, they are the first dimension,
        because tensor parallelism divides each of them."""
        return (*([self.tensors] if self.tensors > 1 else []), outputs // self.tensors, rank)


def of_experts(row: Row) -> bool:
    """Whether the row of `weights.table` is a matrix of the routed experts."""
    return "{expert}" in row.megatron


def adapted_rows(architecture: Architecture) -> list[Row]:
    """The rows of `weights.table` that may have adapters: matrices of layers that tensor parallelism splits.

    In a mixture of experts only attention and the routed experts may: PEFT would take the names of dense layers and of
    shared experts for those of routed experts (`utils/transformers_weight_conversion.py`,
    `_MOE_TARGET_MODULE_MAPPING`).
    """
    linear = [
        row
        for row in architecture.table
        if row.megatron.endswith(".weight") and "{layer}" in row.megatron and row.split != "none"
    ]
    if not architecture.experts:
        return linear
    return [row for row in linear if ".self_attention." in row.megatron or of_experts(row)]


def row_kinds(row: Row) -> tuple[str, ...]:
    """The kinds of the Hugging Face layers in a row of the table, such as `q_proj`, `k_proj` and `v_proj`."""
    if of_experts(row):
        return (GATE_UP,) if row.form == "gated" else (DOWN,)
    return tuple(name.removesuffix(".weight").rpartition(".")[2] for name, _ in row.hf)


def target_kinds(architecture: Architecture, targets: Targets, where: str = "lora.targets") -> tuple[str, ...]:
    """The kinds of layers that `targets` names, in the table's order; `where` names the setting in errors.

    Raises UserError if a name is not that of a layer that may have an adapter, for an empty list, and for models with
    latent attention or gated delta networks.
    """
    if architecture.delta:
        raise UserError(
            f"lora: adapters do not fit {architecture.family}, whose gated delta networks shard sections of a "
            "projection; leave [lora] out and train the weights"
        )
    if architecture.latent:
        raise UserError(
            f"lora: adapters do not fit {architecture.family}, whose latents are projected whole on every rank and "
            "whose layers are of two kinds; leave [lora] out and train the weights"
        )
    known = tuple(name for row in adapted_rows(architecture) for name in row_kinds(row))
    if targets == "all-linear":
        return known
    if unknown := [name for name in targets if name not in known]:
        raise UserError(
            f"{where}: {architecture.family} has no linear layer {unknown[0]!r} that can have an adapter; name some of "
            f"{list(known)}"
        )
    if not targets:
        raise UserError(f"{where} names no layer, which leaves nothing to train; name some of {list(known)}")
    return tuple(name for name in known if name in targets)


def leaves_of(row: Row, layer: int, architecture: Architecture, kinds: Sequence[str]) -> list[Leaf]:
    """The Hugging Face layers in a row of the table, in the row's order, with or without an adapter.

    `kinds` are the kinds of layers that have adapters. Only the name of the experts' layers depends on it: PEFT wraps
    the experts' module once for `gate_up_proj` and once for `down_proj`, if they have adapters. If both have, the
    wrapper of `down_proj` is the outer one, and the name of `gate_up_proj` contains `.base_layer`.
    """
    shapes = [architecture.shape(letters) for _, letters in row.hf]
    if of_experts(row):
        [kind] = row_kinds(row)
        inner = ".base_layer" if kind == GATE_UP and DOWN in kinds else ""
        rows = sum(outputs for outputs, _ in shapes)
        name = f"model.layers.{layer}.{EXPERTS}{inner}"
        return [Leaf(name, kind, rows, shapes[0][1], architecture.experts, len(shapes))]
    names = [name.format(layer=layer).removesuffix(".weight") for name, _ in row.hf]
    return [Leaf(name, kind, *shape) for name, kind, shape in zip(names, row_kinds(row), shapes, strict=True)]


def adapter_parameters(
    architecture: Architecture, rank: int, targets: Targets, layers: range, tensor: int = 1, expert: int = 1
) -> tuple[int, int]:
    """The number of parameters in the adapters of `layers` on one rank: (outside of routed experts, in routed experts).

    `tensor` and `expert` are the degrees of parallelism. Tensor parallelism divides one of the two factors; every rank
    has the other one whole.
    """
    kinds, dense, routed = target_kinds(architecture, targets), 0, 0
    for row in adapted_rows(architecture):
        copies = sum(architecture.has_row(row, layer) for layer in layers)
        for leaf in leaves_of(row, 0, architecture, kinds):
            divided, undivided = (leaf.outputs, leaf.inputs) if row.split == "rows" else (leaf.inputs, leaf.outputs)
            numel = copies * rank * (divided // tensor + undivided) * (leaf.kind in kinds)
            dense += 0 if leaf.experts else numel
            routed += leaf.experts // expert * numel
    return dense, routed


def adapted_leaves(architecture: Architecture, kinds: Sequence[str]) -> Iterator[Leaf]:
    """Yield every layer of the whole model that has an adapter, in the model's order."""
    rows = adapted_rows(architecture)
    for layer in range(architecture.layers):
        for row in rows:
            if architecture.has_row(row, layer):
                yield from (leaf for leaf in leaves_of(row, layer, architecture, kinds) if leaf.kind in kinds)
