"""The learner on one rank: model chunks, optimizer and counters, built from a recipe, and their offload to the host."""

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
from mugrpo_megatron.learner.context import fastest_flash
from mugrpo_megatron.learner.groups import Ranks, initialize, seed_generators
from mugrpo_megatron.learner.model import Adapters, PolicyModel, build_model, parameters, policy
from mugrpo_megatron.learner.optimizer import build_optimizer, shards
from mugrpo_megatron.learner.routing import install
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.hf import load_hf

Part = Literal["optimizer", "weights"]
"""A part of the learner's device memory. `optimizer` is moments, gradients and master weights, which a sync of weights
to an engine does not need; `weights` is the rest. In float32 the master weights belong to `weights`."""
PARTS: tuple[Part, ...] = ("optimizer", "weights")
# All host allocations have this size, a power of two. torch rounds pinned allocations up to a power of two, so one for
# each tensor could take twice its bytes; and it reuses freed ones only for requests of the same size
# (ATen/core/CachingHostAllocator.h).
SLAB = 1 << 26
"""Bytes of one host allocation."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor whose device memory is freed, and its bytes in host memory."""

    tensor: torch.Tensor
    bytes: int
    host: list[torch.Tensor] | None
    """The bytes in order: uint8 slices of host allocations of `SLAB` bytes, pinned for CUDA. None for a tensor that is
    restored as zeros."""


@dataclass
class Learner:
    """One rank's share of the policy and of its optimizer, and the counters of the run."""

    recipe: Recipe
    ranks: Ranks
    architecture: Architecture
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    adapters: Adapters | None = None
    """Adapters that train instead of the weights, if there are any."""
    updates_done: int = 0
    """Number of updates taken, skipped updates included; it determines the learning rate."""
    steps_done: int = 0
    """Optimizer steps: `updates_done` minus the updates skipped for a non-finite gradient."""
    skipped_in_a_row: int = 0
    """Number of updates that were skipped since the last step, without those skipped for an overflow in float16."""
    offloaded: dict[str, list[HostCopy]] = field(default_factory=dict)
    """State that is in host memory, by part (see `offload`)."""

    @property
    def models(self) -> list[PolicyModel]:
        return [policy(chunk) for chunk in self.chunks]

    def adapter_files(self) -> dict[str, Any]:
        """The adapters' files by their names in `hf/`, on rank 0; empty without adapters. Collective."""
        return self.adapters.files(self.models) if self.adapters else {}

    @property
    def routed(self) -> tuple[int, int]:
        """The number of experts in a layer of a mixture of experts, and the number of them that a token is sent to."""
        return self.architecture.experts, self.architecture.transformer["moe_router_topk"]

    @property
    def lanes(self) -> int:
        """The number of micro-batches that each rank runs at once on CPU, the same on every rank; 1 on CUDA."""
        ranks, recipe = self.ranks, self.recipe
        # Micro-batches run concurrently only if they are independent computations of one process: ranks could enter
        # collectives inside layers in different orders, and Megatron keeps the state of experts and of recomputation
        # for one micro-batch.
        parallel = max(ranks.tp_size, ranks.pp_size, ranks.cp_size) > 1
        stateful = bool(self.architecture.experts) or recipe.learner.recompute != "none"
        scaled = recipe.model.dtype == "float16"
        if ranks.device.type != "cpu" or parallel or stateful or scaled or parameters(self.chunks) > MOST_PARAMETERS:
            return 1
        return min(ranks.threads, MOST_LANES)

    def offload(self, part: Part) -> None:
        """Move one part of the learner's state to host memory and free it on the device; does nothing on CPU.

        Gradients are freed without a copy: `reload` restores them as zeros.
        """
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
        # The copies must finish before another process, the engine, takes the memory.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move everything that is offloaded back to the device."""
        for copies in self.offloaded.values():
            copy_back(copies)
        self.offloaded.clear()


def build_learner(recipe: Recipe, ranks: Ranks | None = None) -> Learner:
    """Join the world, build this rank's share of the model in `model.path`, load its weights, build the optimizer.

    If the `ranks` of another learner of the same layout are passed, the new learner uses its process groups and shares
    nothing else with it. Collective: every rank of the world calls it. Raises UserError for a layout or a model
    directory that cannot work.
    """
    architecture = read_architecture(recipe.model.directory)
    if ranks:
        seed_generators(recipe.run.seed)
    else:
        ranks = initialize(recipe.run, recipe.parallel, recipe.learner.threads)
    if ranks.device.type == "cpu" and ranks.tp_size > 1 and recipe.parallel.expert > 1:
        raise UserError(
            f"parallel: tensor {ranks.tp_size} with expert {recipe.parallel.expert} needs CUDA: ranks get unequal "
            "numbers of tokens, which gloo cannot gather; on CPU set parallel.tensor or parallel.expert to 1"
        )
    if ranks.device.type == "cuda":
        fastest_flash()
    adapters: Adapters | None = None
    if recipe.lora.rank is not None:
        from mugrpo_megatron.extras.lora.adapters import LoraAdapters

        adapters = LoraAdapters(recipe, architecture)
    chunks = build_model(
        recipe.model, recipe.parallel, recipe.learner, architecture, ranks, adapters, recipe.run.deterministic
    )
    # A dense model has no routers, although its recipe may set a replay.
    if recipe.learner.routing_replay != "off" and architecture.experts:
        install(chunks)
    models = [policy(chunk) for chunk in chunks]
    load_hf(models, recipe.model.directory, architecture)
    if adapters:
        adapters.start(models)
    optimizer = build_optimizer(recipe.optimizer, recipe.model.dtype, chunks)
    for chunk in chunks:
        # With `no_sync_func`, Megatron's schedules let only the last micro-batch reduce gradients.
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunk.no_sync
        chunk.config.finalize_model_grads_func = _reduce_gradients
        chunk.config.grad_scale_func = optimizer.scale_loss if recipe.model.dtype == "float16" else None
    return Learner(recipe, ranks, architecture, chunks, optimizer, adapters)


def _reduce_gradients(chunks: list[torch.nn.Module], tokens: Any, **groups: Any) -> None:
    # num_tokens is None, because Megatron would divide by it, and each token's loss already has its denominator.
    finalize_model_grads(chunks, None, **groups)


def _states(learner: Learner) -> list[torch.Tensor]:
    """The optimizer's moments, and its master weights unless they are views of the model's weights, as in float32."""
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
    free: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """The bytes of the last host allocation that no tensor uses yet."""

    def allocate(self, size: int, pinned: bool) -> Iterator[torch.Tensor]:
        """Yield slices of host memory with `size` bytes in total, from allocations of `SLAB` bytes."""
        while size:
            if not len(self.free):
                self.free = torch.empty(SLAB, dtype=torch.uint8, pin_memory=pinned)
            host, self.free = self.free[:size], self.free[size:]
            size -= len(host)
            yield host


def move_to_host(tensors: Iterable[torch.Tensor], keep: bool = True) -> list[HostCopy]:
    """Copy `tensors`, each of which fills its storage, to the host, and free their device memory.

    If `keep` is false, nothing is copied, and `copy_back` restores zeros. On CUDA the copies are asynchronous: the
    caller synchronises the device before another process takes the memory.
    """
    copies: list[HostCopy] = []
    slabs = _Slabs()
    for tensor in tensors:
        device_bytes = _storage_bytes(tensor)
        host = None
        if keep:
            host = list(slabs.allocate(len(device_bytes), pinned=tensor.is_cuda))
            for host_slice, device_slice in _slices(host, device_bytes):
                host_slice.copy_(device_slice, non_blocking=True)
        copies.append(HostCopy(tensor, len(device_bytes), host))
        # Only the storage is emptied: the tensor and its views, of which Megatron's buffers have many, still refer to
        # it, and `copy_back` restores all of them.
        tensor.untyped_storage().resize_(0)
    return copies


def copy_back(copies: Iterable[HostCopy]) -> None:
    """Allocate the memory that `move_to_host` freed, and restore its values, or zeros where it kept none.

    On CUDA the copies are asynchronous, so the learner reads and packs its first update while they run.
    """
    for copy in copies:
        copy.tensor.untyped_storage().resize_(copy.bytes)
        device_bytes = _storage_bytes(copy.tensor)
        if copy.host is None:
            device_bytes.zero_()
            continue
        for host_slice, device_slice in _slices(copy.host, device_bytes):
            device_slice.copy_(host_slice, non_blocking=True)


def _slices(host: list[torch.Tensor], device_bytes: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each slice of host memory together with the part of `device_bytes` that it is a copy of."""
    return zip(host, device_bytes.split([len(host_slice) for host_slice in host]), strict=True)


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


@contextmanager
def swapped_weights(learner: Learner, directory: Path) -> Iterator[None]:
    """Give the learner a checkpoint's weights inside the block; afterwards its own are restored bitwise.

    Meanwhile copies of its own weights are in host memory: no second model is on the device, and no rank communicates.
    Moments, gradients and master weights are not touched. In float32 the master weights are the parameters, so no step
    and no save may happen inside the block. If adapters train and `directory` is the model that they were added to,
    nothing is loaded, and the adapters get their state of the run's start; for another checkpoint they are turned off.
    Raises UserError, with the weights restored, for a checkpoint that does not fit.
    """
    chunks, adapters = learner.models, learner.adapters
    same = adapters is not None and directory == learner.recipe.model.directory
    weights = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad or not same]
    copies = [weight.detach().to("cpu", copy=True) for weight in weights]
    try:
        if not same:
            load_hf(chunks, directory, learner.architecture)
        if adapters:
            (adapters.start if same else adapters.turn_off)(chunks)
        yield
    finally:
        with torch.no_grad():
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)
