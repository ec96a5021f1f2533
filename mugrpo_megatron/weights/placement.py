"""Which parameters this rank's model chunks hold, and which ranks shard them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from mugrpo_megatron.megatron import get_transformer_layer_offset, parallel_state
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.table import Entry, entries, table_name

WRAPPER = "module."


def tensor_group(entry: Entry) -> torch.distributed.ProcessGroup:
    """The tensor parallel group that shards this parameter."""
    if entry.of_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def local_parameters(
    chunks: Sequence[torch.nn.Module], architecture: Architecture
) -> Iterator[tuple[Entry, torch.nn.Parameter]]:
    """This rank's parameters with their entries in the whole model, in the model's order.

    On the last pipeline stage a tied output layer is a copy of the embedding and has the embedding's entry.
    Raises KeyError for a parameter that is not in the family's table: the table or the model is wrong.
    """
    table = entries(architecture)
    if architecture.tied:
        table["output_layer.weight"] = table["embedding.word_embeddings.weight"]
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield table[whole_name(chunk, name, architecture)], parameter


def whole_name(chunk: torch.nn.Module, name: str, architecture: Architecture) -> str:
    """A chunk's parameter as the table names it: layer and expert numbered over all pipeline stages and ranks."""
    while name.startswith(WRAPPER):
        name = name.removeprefix(WRAPPER)
    name = table_name(name)
    first_layer = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
    name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda found: str(int(found[0]) + first_layer), name)
    if "local_experts" in name:
        held = architecture.experts // parallel_state.get_expert_model_parallel_world_size()
        first_expert = held * parallel_state.get_expert_model_parallel_rank()
        name = re.sub(r"(?<=local_experts\.)\d+", lambda found: str(int(found[0]) + first_expert), name)
    return name
