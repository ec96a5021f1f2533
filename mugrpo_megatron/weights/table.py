"""The arithmetic of the two-way table: which tensors a parameter holds, how they merge, and how ranks share them.

HF tensors  --merge-->  whole Megatron parameter  --shard-->  one rank's parameter
HF tensors  <--split--  whole Megatron parameter  <-unshard-  every rank's parameter
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.blocks import Row

NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Table -> fused; the second stays as it is before experts, which have no linear layer that it could go into.

Megatron's distributed checkpoints know the fused names alone, whatever the layers that wrote them (`mapping.stored`).
"""
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")
_ALONE = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def table_name(name: str) -> str:
    """The name that the tables know a parameter by; a name of theirs is left as it is."""
    for plain, fused in NORMS.items():
        name = name.replace(f".{fused}", f".{plain}")
    return _GROUPED.sub(r".experts.local_experts.\2.\1.weight", name)


def fused_name(name: str, experts: bool) -> str:
    """What Transformer Engine calls the parameter `name` of the tables, in a model with or without experts."""
    for plain, fused in NORMS.items():
        if not (experts and plain == "pre_mlp_layernorm."):
            name = name.replace(f".{plain}", f".{fused}")
    return _ALONE.sub(r".experts.\2.weight\1", name)


DIMENSION = {"rows": 0, "columns": 1}
STORED_NAMES = (
    (re.compile(r"^decoder\.layers\.\d+\."), "decoder.layers."),
    (re.compile(r"\.local_experts\.\d+\."), ".experts."),
    *((re.compile(re.escape(f".{plain}")), f".{fused}") for plain, fused in NORMS.items()),
)
"""What Megatron's `sharded_state_dict` makes of a parameter's name: layers and experts become leading dimensions."""


@dataclass(frozen=True)
class Entry:
    """A row of the table at one layer and expert."""

    row: Row
    layer: int
    expert: int

    def _fill(self, template: str) -> str:
        return template.format(layer=self.layer, expert=self.expert)

    @property
    def megatron(self) -> str:
        """Name of the parameter in the whole model."""
        return self._fill(self.row.megatron)

    @property
    def hf(self) -> tuple[str, ...]:
        return tuple(self._fill(name) for name, _ in self.row.hf)

    @property
    def of_expert(self) -> bool:
        """Whether expert parallelism, not the ordinary tensor parallel group, places the parameter."""
        return "{expert}" in self.row.megatron

    def hf_shapes(self, architecture: Architecture) -> tuple[tuple[int, ...], ...]:
        return tuple(architecture.shape(letters) for _, letters in self.row.hf)


@dataclass(frozen=True)
class Stored:
    """Where a Megatron distributed checkpoint keeps a whole parameter: in a stack over layers and experts."""

    key: str
    index: tuple[int, ...]
    """Place in the stack: (), (layer,) or (layer, expert)."""
    stack: tuple[int, ...]
    """Extent of the stack in the same dimensions."""


def stored(entry: Entry, architecture: Architecture) -> Stored:
    """Key and place of a parameter in a `torch_dist` checkpoint, whatever layout wrote it."""
    key = entry.megatron
    for pattern, replacement in STORED_NAMES:
        key = pattern.sub(replacement, key)
    if entry.of_expert:
        return Stored(key, (entry.layer, entry.expert), (architecture.layers, architecture.experts))
    if "{layer}" in entry.row.megatron:
        return Stored(key, (entry.layer,), (architecture.layers,))
    return Stored(key, (), ())


def entries(architecture: Architecture) -> dict[str, Entry]:
    """Every parameter of the whole model by its Megatron name, in the model's order; none for a tied output layer."""
    rows = [row for row in architecture.table if not (architecture.tied and row.megatron == "output_layer.weight")]
    in_layers = [row for row in rows if "{layer}" in row.megatron]
    first = rows.index(in_layers[0])
    found = [Entry(row, 0, 0) for row in rows[:first]]
    for layer in range(architecture.layers):
        for row in in_layers:
            copies = architecture.experts if "{expert}" in row.megatron else 1
            found += [Entry(row, layer, expert) for expert in range(copies)]
    found += [Entry(row, 0, 0) for row in rows[first:] if row not in in_layers]
    return {entry.megatron: entry for entry in found}


def whole_shape(entry: Entry, architecture: Architecture) -> tuple[int, ...]:
    """Shape of the whole Megatron parameter, without vocabulary padding: its tensors lie one after another in rows."""
    shapes = entry.hf_shapes(architecture)
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def merge(entry: Entry, tensors: Sequence[torch.Tensor], architecture: Architecture) -> torch.Tensor:
    """Hugging Face tensors -> the whole Megatron parameter (without vocabulary padding)."""
    if entry.row.form == "qkv":
        groups = architecture.transformer["num_query_groups"]
        by_group = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(by_group, dim=1).flatten(0, 1)
    if entry.row.form == "gated":
        return torch.cat(list(tensors), dim=0)
    return tensors[0]


def split(entry: Entry, whole: torch.Tensor, architecture: Architecture) -> list[torch.Tensor]:
    """The whole Megatron parameter -> views of it that hold its Hugging Face tensors, in their order when flattened.

    Parts of `qkv` are [groups, rows of a group, ...]: reshaping them to the tensor's shape would copy, so it is left to
    the caller.
    """
    if entry.row.form == "qkv":
        groups = architecture.transformer["num_query_groups"]
        rows = [shape[0] // groups for shape in entry.hf_shapes(architecture)]
        return list(whole.view(groups, -1, *whole.shape[1:]).split(rows, dim=1))
    if entry.row.form == "gated":
        return list(whole.chunk(2, dim=0))
    if entry.row.form == "vocab":
        return [whole[: architecture.vocab_size]]
    return [whole]


def shard(entry: Entry, whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The part of a whole parameter that tensor parallel `rank` of `size` holds; a view where the layout allows it."""
    if entry.row.split == "none" or size == 1:
        return whole
    dimension = DIMENSION[entry.row.split]
    if entry.row.form == "gated":
        return torch.cat([half.chunk(size, dim=dimension)[rank] for half in whole.chunk(2, dim=0)], dim=dimension)
    return whole.chunk(size, dim=dimension)[rank]


def unshard(entry: Entry, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inverse of `shard`, over the shards of all tensor parallel ranks."""
    if entry.row.split == "none" or len(shards) == 1:
        return shards[0]
    dimension = DIMENSION[entry.row.split]
    if entry.row.form == "gated":
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return torch.cat([half[part] for part in (0, 1) for half in halves], dim=dimension)
    return torch.cat(list(shards), dim=dimension)


def pad_vocab(entry: Entry, whole: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows after the vocabulary up to `rows`, so that it divides over the tensor parallel ranks."""
    if entry.row.form != "vocab" or len(whole) == rows:
        return whole
    padded = whole.new_zeros(rows, *whole.shape[1:])
    padded[: len(whole)] = whole
    return padded
