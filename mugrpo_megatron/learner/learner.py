"""The learner on one rank: its model chunks, optimizer and counters, built from a recipe; its state to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer

from mugrpo_megatron.cpu.megatron import MOST_LANES, MOST_PARAMETERS
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.groups import Ranks, initialize, seed_generators
from mugrpo_megatron.learner.model import Adapters, PolicyModel, adapters_of, build_model, parameters, policy
from mugrpo_megatron.learner.optimizer import build_optimizer, shards
from mugrpo_megatron.learner.routing import install
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.hf import load_hf

Part = Literal["optimizer", "weights"]
"""`optimizer`: master weights, moments and gradients, not needed to sync weights to an engine; `weights`: the rest."""
PARTS: tuple[Part, ...] = ("optimizer", "weights")
SLAB = 1 << 26
"""Bytes of one host allocation, a power of two: torch rounds pinned allocations up to a power of two, so one for each
tensor could take twice its bytes, and caches freed ones for later requests of the same size."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor with an emptied storage, and its bytes in host memory."""

    tensor: torch.Tensor
    bytes: int
    host: list[torch.Tensor] | None
    """uint8 pieces of host memory (pinned for CUDA), in order; None for a tensor that is restored as zeros."""


@dataclass
class Learner:
    """A rank's share of the policy and its optimizer."""

    recipe: Recipe
    ranks: Ranks
    architecture: Architecture
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    adapters: Adapters | None = None
    """What trains in place of the weights; None where the weights do."""
    updates_done: int = 0
    """Updates taken, including skipped ones; sets the learning rate."""
    steps_done: int = 0
    """Optimizer steps: `updates_done` minus the updates skipped for a non-finite gradient."""
    skipped_in_a_row: int = 0
    """Updates skipped since the last step."""
    offloaded: dict[str, list[HostCopy]] = field(default_factory=dict)
    """Parts of the state that are in host memory (see `offload`)."""

    @property
    def models(self) -> list[PolicyModel]:
        """The chunks without their data parallel wrappers."""
        return [policy(chunk) for chunk in self.chunks]

    def adapter_files(self) -> dict[str, Any]:
        """The adapter's files by their names in `hf/`, none without adapters; on rank 0, collective."""
        return self.adapters.files(self.models) if self.adapters else {}

    @property
    def routed(self) -> tuple[int, int]:
        """Experts of a layer, and those of them that a token is sent to."""
        return self.architecture.experts, self.architecture.transformer["moe_router_topk"]

    @property
    def lanes(self) -> int:
        """Micro-batches that a rank runs at once on CPU, the same on every rank: an update's packing depends on it.

        Above 1 only where micro-batches are independent computations of one process: without tensor, pipeline and
        context parallelism, experts and recomputation, whose state Megatron keeps for one micro-batch at a time.
        """
        ranks, recipe = self.ranks, self.recipe
        together = max(ranks.tp_size, ranks.pp_size, ranks.cp_size) > 1
        stateful = bool(self.architecture.experts) or recipe.learner.recompute != "none"
        scaled = recipe.model.dtype == "float16"
        if ranks.device.type != "cpu" or together or stateful or scaled or parameters(self.chunks) > MOST_PARAMETERS:
            return 1
        return min(ranks.threads, MOST_LANES)

    def offload(self, part: Part) -> None:
        """Move a part of the state to host memory and free it on the device; on CPU there is nothing to free."""
        if self.ranks.device.type != "cuda" or part in self.offloaded:
            return
        buffers = [buffer for shard in shards(self.optimizer) for buffer in shard.buffers]
        if part == "weights":
            frozen = [p.data for chunk in self.chunks for p in chunk.parameters() if not p.requires_grad]
            self.offloaded[part] = move_to_host([*(buffer.param_data for buffer in buffers), *frozen])
        else:
            self.offloaded[part] = move_to_host(_states(self)) + move_to_host(
                [buffer.grad_data for buffer in buffers], keep=False
            )
        torch.cuda.synchronize()  # the copies must finish before another process takes the memory
        torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move everything that is offloaded back to the device."""
        for copies in self.offloaded.values():
            copy_back(copies)
        self.offloaded.clear()


def build_learner(recipe: Recipe, ranks: Ranks | None = None) -> Learner:
    """Join the world, build this rank's share of the model in `model.path`, load its weights, build the optimizer.

    With `ranks`, the world that another learner of the same layout has joined, process groups are shared and nothing
    else is. Collective: every rank of the world calls it. Raises UserError for a layout or a model directory that
    cannot work.
    """
    architecture = read_architecture(recipe.model.directory)
    if ranks:
        seed_generators(recipe)
    else:
        ranks = initialize(recipe)
    if ranks.device.type == "cpu" and ranks.tp_size > 1 and recipe.parallel.expert > 1:
        raise UserError(
            f"parallel: tensor {ranks.tp_size} with expert {recipe.parallel.expert} needs CUDA: ranks get unequal "
            "numbers of tokens, which gloo cannot gather; on CPU use only one of the two"
        )
    adapters = adapters_of(recipe, architecture)
    chunks = build_model(recipe, architecture, ranks, adapters)
    if recipe.learner.routing_replay != "off" and architecture.experts:  # a warm start's model has none
        install(chunks)
    models = [policy(chunk) for chunk in chunks]
    load_hf(models, recipe.model.directory, architecture)
    if adapters:
        adapters.start(models)
    optimizer = build_optimizer(recipe, chunks)
    for chunk in chunks:
        if chunk.ddp_config.overlap_grad_reduce:  # only the last micro-batch's backward pass is followed by a reduction
            chunk.config.no_sync_func = [each.no_sync for each in chunks] if len(chunks) > 1 else chunk.no_sync
        chunk.config.finalize_model_grads_func = _reduce_gradients
        chunk.config.grad_scale_func = optimizer.scale_loss if recipe.model.dtype == "float16" else None
    return Learner(recipe, ranks, architecture, chunks, optimizer, adapters)


def _reduce_gradients(chunks: list[torch.nn.Module], tokens: Any, **groups: Any) -> None:
    """Sum gradients over ranks without averaging: each token's loss already has the update's denominators."""
    finalize_model_grads(chunks, None, **groups)


def _states(learner: Learner) -> list[torch.Tensor]:
    """Moments, and master weights unless they are views of the model's weights (as in float32)."""
    states = []
    for shard in shards(learner.optimizer):
        weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in shard.buffers}
        for group in shard.optimizer.param_groups:
            for parameter in group["params"]:
                moments = shard.optimizer.state[parameter]
                candidates = [parameter.data, moments["exp_avg"], moments["exp_avg_sq"]]
                states += [t for t in candidates if t.untyped_storage().data_ptr() not in weights]
    return states


@dataclass(slots=True)
class _Slabs:
    """Allocator of host memory without gaps."""

    left: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def take(self, size: int, pinned: bool) -> Iterator[torch.Tensor]:
        """Pieces with `size` bytes in total."""
        while size:
            if not len(self.left):
                self.left = torch.empty(SLAB, dtype=torch.uint8, pin_memory=pinned)
            piece, self.left = self.left[:size], self.left[size:]
            size -= len(piece)
            yield piece


def move_to_host(tensors: Iterable[torch.Tensor], keep: bool = True) -> list[HostCopy]:
    """Empty the storages of `tensors`, each of which fills its storage; without `keep` their values are dropped.

    Only storages are emptied: every tensor object and every view of it (Megatron's buffers have many) stays valid and
    has its values again after `copy_back`.

    On CUDA the copies here and in `copy_back` are asynchronous, so the learner reads and packs its first update while
    they run. Synchronise the device before another process takes the memory.
    """
    copies: list[HostCopy] = []
    room = _Slabs()
    for tensor in tensors:
        whole = _bytes_of(tensor)
        host = None
        if keep:
            host = list(room.take(len(whole), pinned=tensor.is_cuda))
            for piece, part in _pairs(host, whole):
                piece.copy_(part, non_blocking=True)
        copies.append(HostCopy(tensor, len(whole), host))
        tensor.untyped_storage().resize_(0)
    return copies


def copy_back(copies: Iterable[HostCopy]) -> None:
    """Fill the storages again."""
    for each in copies:
        each.tensor.untyped_storage().resize_(each.bytes)
        whole = _bytes_of(each.tensor)
        if each.host is None:
            whole.zero_()
            continue
        for piece, part in _pairs(each.host, whole):
            part.copy_(piece, non_blocking=True)


def _pairs(pieces: list[torch.Tensor], whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece of host memory, paired with the part of the tensor that it holds."""
    return zip(pieces, whole.split([len(piece) for piece in pieces]), strict=True)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage as uint8."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


@contextmanager
def swapped_weights(learner: Learner, directory: Path) -> Iterator[None]:
    """Inside the block every rank's parameters are those of the checkpoint; then its own again, bit by bit.

    The own ones wait in host memory: no second model on the device, and no communication. Moments, gradients and, but
    for float32, master weights are not touched; in float32 these are the parameters, so no step and no save may happen
    inside. Adapters are off, over the weights that they began with they are as at the start, and nothing is loaded.
    Raises UserError for a checkpoint that does not fit; the learner then has its own weights.
    """
    chunks, adapters = learner.models, learner.adapters
    same = adapters is not None and directory == learner.recipe.model.directory
    weights = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad or not same]
    own = [weight.detach().to("cpu", copy=True) for weight in weights]
    try:
        if not same:
            load_hf(chunks, directory, learner.architecture)
        if adapters:
            (adapters.start if same else adapters.turn_off)(chunks)
        yield
    finally:
        with torch.no_grad():
            for weight, copy in zip(weights, own, strict=True):
                weight.copy_(copy)
