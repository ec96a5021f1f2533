"""Input of a plan: a recipe, its model's config, its layout on a cluster, and the parameters of each rank."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from mugrpo_megatron.checks.layouts import bundled_configs
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.lora.targets import adapter_parameters
from mugrpo_megatron.extras.plan.hardware import Assumptions, Cluster
from mugrpo_megatron.files.hf_config import check_config, read_config_file
from mugrpo_megatron.files.hub import model_config, model_name
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import ModelSection
from mugrpo_megatron.recipe.systems import ParallelSection
from mugrpo_megatron.weights.architecture import Architecture, stage_layers
from mugrpo_megatron.weights.blocks import Row
from mugrpo_megatron.weights.families import architecture


@dataclass(frozen=True)
class ModelShape:
    config: dict[str, Any]
    """The fields of config.json."""
    architecture: Architecture
    source: str


def find_model(section: ModelSection, config: Path | None = None) -> ModelShape:
    """Find the config of the model to plan for: in the file `config` if given, else as `find_shape` does.

    No weights are needed. Raises UserError, which names the ways to give a config, when there is none.
    """
    if config is None:
        return find_shape(section.directory, section.revision)
    if config.is_file():
        return _from_file(config)
    raise UserError(f"--model-config {config}: no such file; it is the config.json of a Hugging Face model")


def find_shape(path: Path, revision: str | None = None, key: str = "model.path") -> ModelShape:
    """Find the config of the model that `key` of a recipe names: in `path`, else in models.toml, else on the hub."""
    if (path / "config.json").is_file():
        return _from_file(path / "config.json")
    table = bundled_configs()
    if path.name in table:
        source = f"bundled shape of {path.name}"
        return ModelShape(table[path.name], architecture(table[path.name], f"models.toml, {path.name}"), source)
    hub = model_name(path)
    return _from_hub(hub, revision, key) if hub else _unknown(path, key, table)


def _unknown(path: Path, key: str, table: Mapping[str, Any]) -> NoReturn:
    close = difflib.get_close_matches(path.name, table, n=3)
    meant = f"did you mean {' or '.join(close)}?" if close else f"those are {', '.join(sorted(table))};"
    alternative = ", or pass --model-config FILE" if key == "model.path" else ""
    raise UserError(
        f"{key} = {path} holds no config.json and {path.name!r} is not one of the bundled shapes: {meant} otherwise "
        f"name a model of the hub{alternative}"
    )


def _from_hub(name: str, revision: str | None, key: str) -> ModelShape:
    where = f"{name}'s config.json"
    try:
        config = json.loads(model_config(name, revision))
    except ValueError as error:
        raise UserError(
            f"{key} = {name}: no such directory, none of the bundled shapes, and its config.json could not be "
            f"downloaded from the Hugging Face hub ({error}); check the name and the network"
            + ", or pass --model-config FILE"
            * (key == "model.path")
        ) from None
    return ModelShape(config, architecture(check_config(config, where), where), f"config.json of {name} on the hub")


def _from_file(path: Path) -> ModelShape:
    config = read_config_file(path)
    return ModelShape(dict(config), architecture(config, str(path)), str(path))


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How the learner's ranks are laid out: the recipe's parallel section and its choice of recomputation.

    `data`, the degree of data parallelism, follows from the cluster's size.
    """

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


def layout_of(parallel: ParallelSection, recompute: str, world: int) -> Layout:
    """The layout on `world` ranks, a multiple of tensor x pipeline x context."""
    replica = parallel.tensor * parallel.pipeline * parallel.context
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        data=max(1, world // replica),
        sequence=parallel.sequence,
        recompute=recompute,
    )


@dataclass(frozen=True, slots=True)
class RankParameters:
    dense: int
    experts: int
    vocabulary: int
    """Parameters of the embedding and the output layer that the rank has; they are part of `dense`."""

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def shared(self, layout: Layout) -> float:
        """Number of parameters whose optimizer states a rank holds; it writes about as many parameters to a
        checkpoint."""
        return self.dense / layout.shards + self.experts / layout.expert_shards


def stage_range(architecture: Architecture, layout: Layout, pp_stage: int) -> range:
    """Numbers of the layers of a pipeline stage, as if it were not interleaved."""
    counts = stage_layers(architecture.layers, layout.pipeline)
    first = sum(counts[:pp_stage])
    return range(first, first + counts[pp_stage])


def rank_parameters(architecture: Architecture, layout: Layout, pp_stage: int) -> RankParameters:
    """Count the parameters of a rank of pipeline stage `pp_stage`, vocabulary padding included.

    A tied output layer counts only if there are several pipeline stages: the last one then has a copy of the embedding.
    """
    layers = stage_range(architecture, layout, pp_stage)
    last = pp_stage == layout.pipeline - 1
    dense = experts = vocabulary = 0
    for row in architecture.table:
        size, copies = (
            _numel(row, architecture, layout.tensor),
            sum(architecture.has_row(row, layer) for layer in layers),
        )
        if "{expert}" in row.megatron:
            experts += copies * (architecture.experts // layout.expert) * size
        elif "{layer}" in row.megatron:
            dense += copies * size
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
    return rank_parameters(architecture, Layout(), 0).total


def largest_parameter(architecture: Architecture) -> int:
    """Number of elements of the largest parameter; the experts of a layer count as separate parameters."""
    return max(_numel(row, architecture, 1) for row in architecture.table)


def _numel(row: Row, architecture: Architecture, tensor: int) -> int:
    shapes = [architecture.shape(letters) for _, letters in row.hf]
    if row.form == "vocab":
        rows, width = shapes[0]
        return -(-rows // tensor) * width
    numel = sum(math.prod(shape) for shape in shapes)
    return numel if row.split == "none" else numel // tensor


ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PlanCase:
    """The input of every part of the plan; `layout` is the recipe's layout on the cluster."""

    recipe: Recipe
    architecture: Architecture
    config: Mapping[str, Any]
    """The Hugging Face config that `architecture` was read from."""
    layout: Layout
    cluster: Cluster
    assumptions: Assumptions
    auxiliaries: Mapping[str, ModelShape] = field(default_factory=dict)
    """Name of an auxiliary model -> its shape."""

    @property
    def itemsize(self) -> int:
        """Bytes of one number of the weights or activations."""
        return ITEMSIZE[self.recipe.model.dtype]

    @property
    def cuda(self) -> bool:
        return self.cluster.device.cuda

    @property
    def responses(self) -> int:
        """Responses of one update."""
        return self.recipe.rollout.prompts_per_update * self.recipe.rollout.responses_per_prompt

    @property
    def mean_prompt(self) -> float:
        """Mean number of tokens of a prompt."""
        return max(1.0, self.assumptions.mean_prompt * self.recipe.data.max_prompt_tokens)

    @property
    def mean_response(self) -> float:
        """Mean number of tokens of a response."""
        return max(1.0, self.assumptions.mean_response * self.recipe.rollout.max_response_tokens)

    @property
    def mean_sequence(self) -> float:
        """Mean number of tokens of a prompt and a response together."""
        return self.mean_prompt + self.mean_response

    def adapter(self, layout: Layout) -> RankParameters | None:
        """The adapter's parameters on a rank with the model's last layers, which are all that the rank trains; None
        without `[lora]`."""
        section = self.recipe.lora
        if section.rank is None:
            return None
        layers = range(self.architecture.layers)[-(self.architecture.layers // layout.pipeline) :]
        counts = adapter_parameters(
            self.architecture, section.rank, section.targets, layers, layout.tensor, layout.expert
        )
        return RankParameters(*counts, 0)

    def trained(self, pp_stage: int) -> RankParameters:
        """Parameters that a rank of a pipeline stage trains: the adapter's, or without an adapter all that the rank
        has."""
        return self.adapter(self.layout) or rank_parameters(self.architecture, self.layout, pp_stage)

    def with_recipe(self, recipe: Recipe) -> PlanCase:
        """The same case with another recipe, in that recipe's layout."""
        return replace(
            self, recipe=recipe, layout=layout_of(recipe.parallel, recipe.learner.recompute, self.cluster.world)
        )

    def on_cluster(self, nodes: int, per_node: int) -> PlanCase:
        """The same case on a cluster of another size, with the same devices."""
        return replace(self, cluster=Cluster(nodes, per_node, self.cluster.device)).with_recipe(self.recipe)

    def with_keys(self, section: str, **keys: Any) -> PlanCase:
        """The same case with these values of keys in the recipe's section `section`."""
        changed = getattr(self.recipe, section).model_copy(update=keys)
        return self.with_recipe(self.recipe.model_copy(update={section: changed}))


def make_case(
    recipe: Recipe, architecture: Architecture, config: Mapping[str, Any], cluster: Cluster, assumptions: Assumptions
) -> PlanCase:
    """The case of a recipe in its own layout; whether that fits the cluster's ranks is not checked here."""
    auxiliaries = {
        name: find_shape(auxiliary.model, None, f"auxiliary.{name}.model")
        for name, auxiliary in recipe.auxiliary.by_name.items()
    }
    layout = layout_of(recipe.parallel, recipe.learner.recompute, cluster.world)
    return PlanCase(recipe, architecture, config, layout, cluster, assumptions, auxiliaries)
