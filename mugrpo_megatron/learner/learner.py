"""The learner on one rank: its model chunks, optimizer and counters, built from a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.groups import Ranks, initialize, seed_generators
from mugrpo_megatron.learner.model import build_model, policy
from mugrpo_megatron.learner.optimizer import build_optimizer
from mugrpo_megatron.learner.pinned import HostCopy
from mugrpo_megatron.learner.routing import install
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.checks import check_layers
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.hf import load_hf


@dataclass
class Learner:
    """A rank's share of the policy and its optimizer."""

    recipe: Recipe
    ranks: Ranks
    architecture: Architecture
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    updates_done: int = 0
    """Updates taken, including skipped ones; sets the learning rate."""
    steps_done: int = 0
    """Optimizer steps: `updates_done` minus the updates skipped for a non-finite gradient."""
    skipped_in_a_row: int = 0
    """Updates skipped since the last step."""
    offloaded: dict[str, list[HostCopy]] = field(default_factory=dict)
    """Parts of the state that are in host memory (see `offload`)."""

    @property
    def routed(self) -> tuple[int, int]:
        """Experts of a layer, and those of them that a token is sent to."""
        return self.architecture.experts, self.architecture.transformer["moe_router_topk"]


def build_learner(recipe: Recipe, ranks: Ranks | None = None) -> Learner:
    """Join the world, build this rank's share of the model in `model.path`, load its weights, build the optimizer.

    With `ranks`, the world that another learner of the same layout has joined, process groups are shared and nothing
    else is. Collective: every rank of the world calls it. Raises UserError for a layout or a model directory that
    cannot work.
    """
    architecture = read_architecture(recipe.model.directory)
    check_layers(recipe, torch.cuda.is_available())
    if ranks:
        seed_generators(recipe)
    else:
        ranks = initialize(recipe)
    if ranks.device.type == "cpu" and ranks.tp_size > 1 and recipe.parallel.expert > 1:
        raise UserError(
            f"parallel: tensor {ranks.tp_size} with expert {recipe.parallel.expert} needs CUDA: ranks get unequal "
            "numbers of tokens, which gloo cannot gather; on CPU use only one of the two"
        )
    chunks = build_model(recipe, architecture, ranks)
    if recipe.learner.routing_replay != "off" and architecture.experts:  # a warm start's model has none
        install(chunks)
    load_hf([policy(chunk) for chunk in chunks], recipe.model.directory, architecture)
    optimizer = build_optimizer(recipe, chunks)
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = _reduce_gradients
        chunk.config.grad_scale_func = optimizer.scale_loss if recipe.model.dtype == "float16" else None
    return Learner(recipe, ranks, architecture, chunks, optimizer)


def _reduce_gradients(chunks: list[torch.nn.Module], tokens: Any, **groups: Any) -> None:
    """Sum gradients over ranks without averaging: each token's loss already has the update's denominators."""
    finalize_model_grads(chunks, None, **groups)
