"""The learner's layout on a cluster, and the parameters that each of its ranks holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.blocks import Row


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """The recipe's parallel section and recompute choice on a cluster of a known size, which decides `data`."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    sequence: bool = False
    recompute: str = "none"

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer states of a dense parameter: data times context parallel."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks that share the optimizer states of an expert's parameter."""
        return self.shards // self.expert

    def __str__(self) -> str:
        names = {"tensor": "TP", "pipeline": "PP", "virtual": "VPP", "context": "CP", "expert": "EP", "data": "DP"}
        sizes = [f"{short}{getattr(self, name)}" for name, short in names.items() if getattr(self, name) > 1]
        extras = ["SP"] * self.sequence + [f"{self.recompute} recompute"] * (self.recompute != "none")
        return " ".join(sizes + extras) or "one rank"


def layout_of(recipe: Recipe, world: int) -> Layout:
    """The recipe's layout on `world` ranks, a multiple of tensor x pipeline x context."""
    parallel = recipe.parallel
    replica = parallel.tensor * parallel.pipeline * parallel.context
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        data=max(1, world // replica),
        sequence=parallel.sequence,
        recompute=recipe.learner.recompute,
    )


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank."""

    dense: int
    experts: int
    vocabulary: int
    """Embedding and output layer, part of `dense`; one of them is the largest single parameter."""

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def shared(self, layout: Layout) -> float:
        """Parameters whose optimizer states a rank holds, and about those that it writes to a checkpoint."""
        return self.dense / layout.shards + self.experts / layout.expert_shards


def rank_parameters(architecture: Architecture, layout: Layout, pp_stage: int) -> RankParameters:
    """Parameters of a rank of `pp_stage`, vocabulary padding included, from the table that loads weights.

    A tied output layer is the embedding itself with one pipeline stage, and a copy of it on the last of several.
    """
    layers = architecture.layers // layout.pipeline
    last = pp_stage == layout.pipeline - 1
    dense = experts = vocabulary = 0
    for row in architecture.table:
        size = _numel(row, architecture, layout.tensor)
        if "{expert}" in row.megatron:
            experts += layers * (architecture.experts // layout.expert) * size
        elif "{layer}" in row.megatron:
            dense += layers * size
        elif row.megatron.startswith("embedding"):
            vocabulary += size if pp_stage == 0 else 0
        elif row.megatron.startswith("output_layer"):
            shared = architecture.tied and layout.pipeline == 1
            vocabulary += size if last and not shared else 0
        else:
            dense += size if last else 0
    return RankParameters(dense + vocabulary, experts, vocabulary)


def parameters(architecture: Architecture) -> int:
    """Parameters of the whole model, each counted once and without padding."""
    whole = rank_parameters(architecture, Layout(), 0)
    return whole.total


def _numel(row: Row, architecture: Architecture, tensor: int) -> int:
    shapes = [architecture.shape(letters) for _, letters in row.hf]
    if row.form == "vocab":
        rows, width = shapes[0]
        return -(-rows // tensor) * width
    numel = sum(math.prod(shape) for shape in shapes)
    return numel if row.split == "none" else numel // tensor
