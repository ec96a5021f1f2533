"""Layers with adapters, and the names and shapes of their tensors. No torch is imported.

PEFT 0.21.2 has one pair of factors for each linear layer, and for the routed experts of a layer, whose matrices
transformers keeps in the parameters `gate_up_proj` and `down_proj`, one pair for each parameter, with every expert's
own part in it (`tuners/lora/layer.py`, `ParamWrapper`).
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
    """A Hugging Face linear layer with an adapter, y = W x + scale B A x; for routed experts, that layer of all
    experts."""

    name: str
    """PEFT's name of the module, such as `model.layers.0.self_attn.q_proj`."""
    kind: str
    """Kind of the layer, as `lora.targets` names it: `q_proj`."""
    outputs: int
    inputs: int
    experts: int = 0
    """Routed experts whose layers it has; 0 for a layer that is no expert's."""
    tensors: int = 1
    """Tensors of a Hugging Face checkpoint in one layer, one above the other: an expert's gate and up projection."""

    @property
    def a(self) -> str:
        """PEFT's name of A, [rank, inputs]; of experts [experts * rank, inputs]."""
        return f"{PREFIX}{self.name}.lora_A.weight"

    @property
    def b(self) -> str:
        """PEFT's name of B, [outputs, rank]; of experts [outputs, rank * experts], the expert's index the fastest."""
        return f"{PREFIX}{self.name}.lora_B.weight"

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        columns = rank * max(1, self.experts)
        return {self.a: (columns, self.inputs), self.b: (self.outputs, columns)}

    def of_expert(self, a: torch.Tensor, b: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, inputs] and B [outputs, rank] of one expert, views of PEFT's tensors; without experts these."""
        if not self.experts:
            return a, b
        return a.view(self.experts, -1, self.inputs)[expert], b.view(self.outputs, -1, self.experts)[..., expert]

    def named(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """PEFT's tensors, by name, for the whole factors `a` and `b` of the learner, which has experts as a stack."""
        if not self.experts:
            return {self.a: a, self.b: b}
        return {self.a: a.flatten(0, 1), self.b: b.flatten(1, -2).permute(1, 2, 0).flatten(1)}

    def shape_of_b(self, outputs: int, rank: int) -> tuple[int, ...]:
        """Shape of the learner's B for `outputs` rows; a layer's tensors are a dimension, since parallelism divides
        each."""
        return (*([self.tensors] if self.tensors > 1 else []), outputs // self.tensors, rank)


def of_experts(row: Row) -> bool:
    """Whether the row is a matrix of the routed experts."""
    return "{expert}" in row.megatron


def adapted_rows(architecture: Architecture) -> list[Row]:
    """Rows of the table that may have adapters: matrices of layers that tensor parallelism splits.

    Of a mixture those of attention and of the routed experts: PEFT takes the names of dense layers and of shared
    experts for the experts' (`utils/transformers_weight_conversion.py`, `_MOE_TARGET_MODULE_MAPPING`).
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
    """The kinds of the layers in a row: `q_proj`, `k_proj`, `v_proj`."""
    if of_experts(row):
        return (GATE_UP,) if row.form == "gated" else (DOWN,)
    return tuple(name.removesuffix(".weight").rpartition(".")[2] for name, _ in row.hf)


def target_kinds(architecture: Architecture, targets: Targets, where: str = "lora.targets") -> tuple[str, ...]:
    """The kinds of layers that `targets` names, in the table's order; `where` names the setting in errors.

    Raises UserError for a name that is none, for no names, for latent attention and for gated delta networks.
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
            f"{where}: {architecture.family} has no linear layer {unknown[0]!r} with an adapter; it has {list(known)}"
        )
    if not targets:
        raise UserError(f"{where} names no layer, which leaves nothing to train; name some of {list(known)}")
    return tuple(name for name in known if name in targets)


def leaves_of(row: Row, layer: int, architecture: Architecture, kinds: Sequence[str]) -> list[Leaf]:
    """The layers of a row, in the order in which they merge, of an adapter on `kinds`.

    PEFT wraps a module for each parameter with an adapter, `down_proj` around `gate_up_proj`, and the inner one's name
    says so.
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
    """(dense, expert) parameters of the adapters of `layers` on one of `tensor` x `expert` ranks.

    Tensor parallelism divides one factor, the other is whole.
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
    """Every layer of the whole model with an adapter, in the model's order."""
    rows = adapted_rows(architecture)
    for layer in range(architecture.layers):
        for row in rows:
            if architecture.has_row(row, layer):
                yield from (leaf for leaf in leaves_of(row, layer, architecture, kinds) if leaf.kind in kinds)
