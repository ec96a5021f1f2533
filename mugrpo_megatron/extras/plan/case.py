"""What a plan is about: a recipe, its model, its layout on a cluster, and the assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mugrpo_megatron.extras.plan.hardware import Assumptions, Cluster
from mugrpo_megatron.extras.plan.layout import Layout, layout_of
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """The input of every part of the plan; `layout` is the recipe's on the cluster."""

    recipe: Recipe
    architecture: Architecture
    config: Mapping[str, Any]
    """The Hugging Face config that `architecture` was read from."""
    layout: Layout
    cluster: Cluster
    assumptions: Assumptions

    @property
    def itemsize(self) -> int:
        """Bytes of a weight or an activation."""
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
        """Tokens of a prompt."""
        return max(1.0, self.assumptions.mean_prompt * self.recipe.data.max_prompt_tokens)

    @property
    def mean_response(self) -> float:
        """Tokens of a response."""
        return max(1.0, self.assumptions.mean_response * self.recipe.rollout.max_response_tokens)

    @property
    def mean_sequence(self) -> float:
        """Tokens of prompt and response together."""
        return self.mean_prompt + self.mean_response

    def with_recipe(self, recipe: Recipe) -> Case:
        """The same case with another recipe, in that recipe's layout."""
        return replace(self, recipe=recipe, layout=layout_of(recipe, self.cluster.world))


def make_case(
    recipe: Recipe, architecture: Architecture, config: Mapping[str, Any], cluster: Cluster, assumptions: Assumptions
) -> Case:
    """The recipe in its own layout; tensor x pipeline x context divides the cluster's ranks."""
    return Case(recipe, architecture, config, layout_of(recipe, cluster.world), cluster, assumptions)
