"""Converts parameters both ways by the families' tables: merges, splits and shards tensors, and names them.

HF tensors  --merge_from_hf-->  unsharded Megatron parameter  --shard-->  one rank's parameter
HF tensors  <--split_to_hf--    unsharded Megatron parameter  <-unshard-  every rank's parameter
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mugrpo_megatron.megatron_compat import get_transformer_layer_offset, parallel_state
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.blocks import Row

DIMENSION = {"rows": 0, "columns": 1}
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Name of a norm in the tables -> its name with Transformer Engine, which fuses it into the linear layer after it.

Experts are no such layer, so a norm before experts keeps its name. In Megatron's distributed checkpoints norms have the
fused names with local layers too (`stored`).
"""
STORED_NAMES = (
    (re.compile(r"^decoder\.layers\.\d+\."), "decoder.layers."),
    (re.compile(r"\.local_experts\.\d+\."), ".experts."),
    *((re.compile(re.escape(f".{plain}")), f".{fused}") for plain, fused in NORMS.items()),
)
"""How Megatron's `sharded_state_dict` renames parameters: the numbers of layers (first pattern) and experts go, because
these become dimensions of the stored tensor."""
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")


@dataclass(frozen=True)
class Entry:
    """One parameter of the model: a row of the table with the numbers of its layer and expert."""

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
        """Whether the parameter belongs to an expert and so uses the expert parallel groups."""
        return "{expert}" in self.row.megatron

    def hf_shapes(self, architecture: Architecture) -> tuple[tuple[int, ...], ...]:
        return tuple(architecture.shape(letters) for _, letters in self.row.hf)


def entries(architecture: Architecture) -> dict[str, Entry]:
    """Every parameter of the whole model by its Megatron name, in the model's order, without a tied output layer."""
    rows = [row for row in architecture.table if not (architecture.tied and row.megatron == "output_layer.weight")]
    in_layers = [row for row in rows if "{layer}" in row.megatron]
    first = rows.index(in_layers[0])
    entries = [Entry(row, 0, 0) for row in rows[:first]]
    for layer in range(architecture.layers):
        for row in (row for row in in_layers if architecture.has_row(row, layer)):
            copies = architecture.experts if "{expert}" in row.megatron else 1
            entries += [Entry(row, layer, expert) for expert in range(copies)]
    entries += [Entry(row, 0, 0) for row in rows[first:] if row not in in_layers]
    return {entry.megatron: entry for entry in entries}


def whole_shape(entry: Entry, architecture: Architecture) -> tuple[int, ...]:
    """The shape of the unsharded Megatron parameter, without vocabulary padding: that of its tensors concatenated."""
    shapes = entry.hf_shapes(architecture)
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def merge_from_hf(entry: Entry, tensors: Sequence[torch.Tensor], architecture: Architecture) -> torch.Tensor:
    """Merge a parameter's Hugging Face tensors into the unsharded Megatron parameter, without vocabulary padding."""
    if entry.row.form in ("qkv", "qkv_gated"):
        groups = architecture.transformer["num_query_groups"]
        by_group = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
        if entry.row.form == "qkv_gated":
            # In Hugging Face's tensor each head's gate follows its query; in Megatron's all gates of a group follow its
            # queries.
            heads = by_group[0].unflatten(1, (-1, 2, architecture.transformer["kv_channels"]))
            by_group[0] = heads.transpose(1, 2).flatten(1, 3)
        return torch.cat(by_group, dim=1).flatten(0, 1)
    return torch.cat(list(tensors), dim=0) if len(tensors) > 1 else tensors[0]


def split_to_hf(entry: Entry, unsharded: torch.Tensor, architecture: Architecture) -> list[torch.Tensor]:
    """Split the unsharded Megatron parameter into views that have the elements of its Hugging Face tensors in order.

    The views of `qkv` are [groups, rows of a group, ...], those of queries with gates [groups, heads, 2, dim, ...].
    They are not in the tensors' shapes, because reshaping them would copy. `unsharded` may also be a rank's shard of a
    linear layer, unless its form is `stacked`. The views are then of that rank's shard of each tensor.
    """
    if entry.row.form in ("qkv", "qkv_gated"):
        groups = architecture.transformer["num_query_groups"]
        rows = [shape[0] // groups for shape in entry.hf_shapes(architecture)]
        views = list(unsharded.view(-1, sum(rows), *unsharded.shape[1:]).split(rows, dim=1))
        if entry.row.form == "qkv_gated":
            heads = views[0].unflatten(1, (2, -1, architecture.transformer["kv_channels"]))
            views[0] = heads.transpose(1, 2)
        return views
    if entry.row.form == "gated":
        return list(unsharded.chunk(2, dim=0))
    if entry.row.form == "vocab":
        return [unsharded[: architecture.vocab_size]]
    if entry.row.form == "stacked":
        return list(unsharded.split([shape[0] for shape in entry.hf_shapes(architecture)], dim=0))
    return [unsharded]


def shard(entry: Entry, unsharded: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return the shard of an unsharded parameter on tensor parallel rank `rank` of `size`; a view where possible."""
    if entry.row.split == "none" or size == 1:
        return unsharded
    dimension = DIMENSION[entry.row.split]
    if entry.row.sections:
        sections = unsharded.split([rows for _, rows in entry.row.sections])
        return torch.cat([section.chunk(size)[rank] for section in sections])
    if entry.row.form == "gated":
        return torch.cat([half.chunk(size, dim=dimension)[rank] for half in unsharded.chunk(2, dim=0)], dim=dimension)
    return unsharded.chunk(size, dim=dimension)[rank]


def unshard(entry: Entry, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the shards of all tensor parallel ranks, in rank order, to the unsharded parameter; inverse of `shard`."""
    if entry.row.split == "none" or len(shards) == 1:
        return shards[0]
    dimension = DIMENSION[entry.row.split]
    if entry.row.sections:
        rows = [size // len(shards) for _, size in entry.row.sections]
        sections = zip(*(shard.split(rows) for shard in shards), strict=True)
        return torch.cat([of_rank for section in sections for of_rank in section])
    if entry.row.form == "gated":
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return torch.cat([rank_halves[half] for half in (0, 1) for rank_halves in halves], dim=dimension)
    return torch.cat(list(shards), dim=dimension)


def pad_vocab(entry: Entry, unsharded: torch.Tensor, rows: int) -> torch.Tensor:
    """Append zero rows to a parameter of the vocabulary until it has `rows` rows; other parameters are unchanged."""
    if entry.row.form != "vocab" or len(unsharded) == rows:
        return unsharded
    padded = unsharded.new_zeros(rows, *unsharded.shape[1:])
    padded[: len(unsharded)] = unsharded
    return padded


@dataclass(frozen=True)
class Stored:
    """Where an unsharded parameter, or a section of it, is in a Megatron distributed checkpoint.

    The checkpoint's tensor may be a stack of the same parameter of all layers, experts or both.
    """

    key: str
    index: tuple[int, ...]
    """Index in the stack: (), (layer,), (expert,) or (layer, expert)."""
    stack: tuple[int, ...]
    """Size of the stack in the same dimensions."""
    shape: tuple[int, ...]
    """Shape of the parameter or section."""

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        return self.stack + self.shape


def stored(entry: Entry, architecture: Architecture) -> list[Stored]:
    """Where a parameter, or each of its sections in order, is in a `torch_dist` checkpoint of any layout."""
    # Megatron stacks layers only if all have the same parameters (TransformerBlock.sharded_state_dict).
    alike = not ((architecture.experts and architecture.dense_layers) or architecture.delta)
    key = entry.megatron
    for pattern, replacement in STORED_NAMES[0 if alike else 1 :]:
        key = pattern.sub(replacement, key)
    index, stack = [], []
    if "{layer}" in entry.row.megatron and alike:
        index, stack = [entry.layer], [architecture.layers]
    if entry.of_expert:
        index, stack = [*index, entry.expert], [*stack, architecture.experts]
    shape = whole_shape(entry, architecture)
    sections = [(f".{name}", (rows, *shape[1:])) for name, rows in entry.row.sections] or [("", shape)]
    return [Stored(key + name, tuple(index), tuple(stack), part) for name, part in sections]


def table_name(name: str) -> str:
    """The table's name of a parameter that is called `name` in a model of local or of Transformer Engine layers."""
    for plain, fused in NORMS.items():
        name = name.replace(f".{fused}", f".{plain}")
    return _GROUPED.sub(r".experts.local_experts.\2.\1.weight", name)


ADAPTER = "adapter_"
"""Prefix of the names of adapters' modules; their parameters are not weights of the model."""


def tensor_group(entry: Entry) -> torch.distributed.ProcessGroup:
    """The tensor parallel group that shards this parameter."""
    if entry.of_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def local_parameters(
    chunks: Sequence[torch.nn.Module], architecture: Architecture
) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Yield this rank's parameters in the model's order, each with its entry in the whole model.

    Buffers that the table lists as `frozen` follow the parameters of their chunk. On the last pipeline stage a tied
    output layer is a copy of the embedding and has the embedding's entry. Adapters have no entries and are skipped.
    Raises KeyError for a parameter that is not in the family's table: the table or the model is wrong.
    """
    table = entries(architecture)
    if architecture.tied:
        table["output_layer.weight"] = table["embedding.word_embeddings.weight"]
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if f".{ADAPTER}" in name:
                continue
            yield table[whole_name(chunk, name, architecture)], parameter
        for name, buffer in chunk.named_buffers():
            entry = table.get(whole_name(chunk, name, architecture))
            if entry and entry.row.frozen:
                yield entry, buffer


def whole_name(chunk: torch.nn.Module, name: str, architecture: Architecture) -> str:
    """The table's name of a chunk's parameter `name`, with the numbers of its layer and expert in the whole model."""
    name = table_name(re.sub(r"^(module\.)+", "", name))
    first_layer = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
    name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: str(int(match[0]) + first_layer), name)
    if "local_experts" in name:
        experts_here = architecture.experts // parallel_state.get_expert_model_parallel_world_size()
        first_expert = experts_here * parallel_state.get_expert_model_parallel_rank()
        name = re.sub(r"(?<=local_experts\.)\d+", lambda match: str(int(match[0]) + first_expert), name)
    return name
