"""AdamW with float32 master weights in Megatron's distributed optimizer, its learning rate and its step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mugrpo_megatron.learner.packing import fill_bins
from mugrpo_megatron.recipe.sections import OptimizerSection


@dataclass(frozen=True, slots=True)
class Step:
    grad_norm: float
    """Global gradient norm before clipping, without the loss scale; nan or inf if the step was skipped."""
    lr: float
    skipped: bool
    overflowed: bool = False
    """Whether the step was skipped because a float16 gradient overflowed at a loss scale that can still be lowered."""


INITIAL_SCALE = 2.0**16
"""The loss scale at the start of a float16 run. An overflow halves it, and 1,000 steps without one double it."""


def build_optimizer(section: OptimizerSection, dtype: str, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Make Megatron's optimizer of the chunks' parameters. It copies their weights, which must be loaded already."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        clip_grad=section.clip_grad,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        initial_loss_scale=INITIAL_SCALE,
        # An update that overflows is lost, so the scale is halved at the first overflow, not at Megatron's second.
        hysteresis=1,
        params_dtype=getattr(torch, dtype),
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron sets this in OptimizerParamScheduler, which is not used here.
        group["weight_decay"] = section.weight_decay * group["wd_mult"]
    for inner in torch_optimizers(optimizer):
        if isinstance(inner, torch.optim.AdamW):
            for group in inner.param_groups:
                group["fused"], group["foreach"] = True, False
    for shard in shards(optimizer):
        # torch would make the moments in the first step, but a checkpoint may be loaded or saved before that.
        shard.init_state_fn(shard.optimizer)
    set_steps(optimizer, 0)
    return optimizer


SMALLEST_SCALE = 1.0
"""Smallest loss scale of a float16 run, Megatron's default `min_loss_scale`."""


def loss_scale(optimizer: MegatronOptimizer) -> float:
    """The factor by which the loss is multiplied before the backward pass: 1 unless the learner is in float16."""
    scaler = shards(optimizer)[0].grad_scaler
    return 1.0 if scaler is None else float(scaler.scale)


def scaler_state(optimizer: MegatronOptimizer) -> dict[str, float]:
    """The loss scaler's state as JSON values; empty without a loss scaler, which only float16 has."""
    scaler = shards(optimizer)[0].grad_scaler
    return {} if scaler is None else {name: float(value) for name, value in scaler.state_dict().items()}


def set_scaler_state(optimizer: MegatronOptimizer, state: dict[str, float]) -> None:
    """Set the loss scaler to a `state` from `scaler_state`; does nothing without a scaler or with an empty state."""
    scaler = shards(optimizer)[0].grad_scaler
    if scaler is not None and state:
        trackers = {name: int(value) for name, value in state.items() if name != "scale"}
        scaler.load_state_dict({**trackers, "scale": torch.tensor([state["scale"]], dtype=torch.float32)})


def set_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Set the number of steps that AdamW's bias correction counts."""
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            # Transformer Engine's and apex's optimizers keep the step count in the parameter group.
            if not isinstance(inner, torch.optim.AdamW):
                group["step"] = steps
                continue
            # torch adds 1 in place, so each parameter needs a tensor of its own. Megatron's loader shares one among all
            # (distrib_optimizer.py), which then counts a step for every parameter.
            for parameter in group["params"]:
                inner.state[parameter]["step"] = torch.tensor(float(steps), device=parameter.device)


def shards(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The distributed optimizers inside `optimizer`: two if both dense and expert parameters are trained, else one."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [shard for shard in chained if not shard.is_stub_optimizer]


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The AdamW inside each shard: Transformer Engine's or apex's if installed, else torch's."""
    return [shard.optimizer for shard in shards(optimizer)]


def learning_rate(section: OptimizerSection, update: int, total: int, stage_progress: float = 0.0) -> float:
    """The learning rate of update number `update` (from 0) of `total`: a linear warm-up, then the section's decay.

    With `decay_over = "stage"`, each stage starts at `lr` again; `stage_progress` is the fraction of the stage's
    updates that are taken.
    """
    if update < section.warmup_updates:
        return section.lr * (update + 1) / section.warmup_updates
    if section.decay == "constant":
        return section.lr
    run_progress = (update - section.warmup_updates) / max(1, total - section.warmup_updates)
    progress = min(1.0, run_progress if section.decay_over == "run" else stage_progress)
    factor = 1.0 - progress if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_lr + (section.lr - section.min_lr) * factor


@torch.no_grad()
def take_step(optimizer: MegatronOptimizer, lr: float, clip: float) -> Step:
    """Take one AdamW step with the reduced gradients, clipped to a global norm of `clip`.

    If the norm is not finite, the step is skipped, and weights and moments stay as they are: one bad gradient would
    corrupt both permanently. The norm is the same on all ranks, so all of them skip together.

    In float16, a non-finite gradient also halves the loss scale (Megatron's scaler). It counts as an overflow, not as a
    bad gradient, unless the scale was at its smallest already.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    scale = loss_scale(optimizer)
    overflowed = optimizer.prepare_grads() and scale > SMALLEST_SCALE
    norm = optimizer.get_grad_norm()
    if overflowed:
        return Step(norm, lr, skipped=True, overflowed=True)
    if not math.isfinite(norm):
        return Step(norm, lr, skipped=True)
    if norm > clip:
        for inner in torch_optimizers(optimizer):
            grads = [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]
            # A rank's shard of a small buffer may be padding only, and torch refuses an empty list.
            if grads:
                torch._foreach_mul_(grads, clip / (norm + 1e-6))
    optimizer.step_with_ready_grads()
    return Step(norm, lr, skipped=False)


STATES = ("param", "exp_avg", "exp_avg_sq")
"""Names of the optimizer's states of a parameter: master weight, first moment, second moment."""


def writers(sizes: Sequence[int], ranks: int) -> list[int]:
    """The data parallel rank, from 0 to `ranks` - 1, that writes each parameter; `sizes` are their numbers of elements.

    All ranks write about equally much.
    """
    writer = [0] * len(sizes)
    for rank, indices in enumerate(fill_bins(sizes, ranks)[0]):
        for index in indices:
            writer[index] = rank
    return writer


def assign_writers(optimizer: DistributedOptimizer, model: list[dict[str, Any]]) -> None:
    """Mark, in the sharded state dicts `model`, the rank that writes each of the optimizer's parameters (`writers`)."""
    # Megatron lets the main replica write: the one whose replica_id, (pipeline, tensor, data parallel rank), is all 0.
    # So the first data parallel rank would write everything. Here the last number is counted from the writer.
    group = optimizer.data_parallel_group
    parameters = list(_sharded_parameters(optimizer, model))
    ranks = writers([parameter.numel() for parameter, _ in parameters], group.size())
    for (_, sharded), writer in zip(parameters, ranks, strict=True):
        sharded.replica_id = (*sharded.replica_id[:-1], (group.rank() - writer) % group.size())


def gather_states(optimizer: DistributedOptimizer, model: list[dict[str, Any]]) -> list[Any]:
    """Gather the float32 states of the parameters that this rank writes, as sharded tensors in host memory.

    Collective over the data parallel group, in which each rank holds a slice of every parameter's states. `model` are
    the sharded state dicts in which `assign_writers` has marked the writers. Parameters that another data parallel
    group writes are skipped.
    """
    gathered = []
    group, mains = optimizer.data_parallel_group, _main_parameters(optimizer)
    for parameter, sharded in _sharded_parameters(optimizer, model):
        if any(sharded.replica_id[:-1]):
            continue
        slices = _local_slice(optimizer, parameter, mains)
        for name in STATES:
            flat = torch.zeros(parameter.numel(), device=parameter.device)
            if slices is not None:
                local, states = slices
                flat[local] = states[name].detach()
            if group.size() > 1:
                writer = (group.rank() - sharded.replica_id[-1]) % group.size()
                # A sum of disjoint slices and zeros, so it is exact.
                dist.reduce(flat, group=group, group_dst=writer)
            if is_main_replica(sharded.replica_id):
                gathered.append(_sharded_like(sharded, name, flat.view(parameter.shape).cpu()))
    return gathered


def read_states(
    optimizer: DistributedOptimizer, model: list[dict[str, Any]], read: Callable[[Any], torch.Tensor]
) -> None:
    """Copy this rank's slice of every parameter's states from a checkpoint into the optimizer.

    `read` fills a sharded state and returns its tensor. It is called for one state at a time, and only for parameters
    with a slice on this rank. Not collective.
    """
    mains = _main_parameters(optimizer)
    for parameter, sharded in _sharded_parameters(optimizer, model):
        slices = _local_slice(optimizer, parameter, mains)
        if slices is not None:
            local, states = slices
            for name in STATES:
                states[name].copy_(read(_sharded_like(sharded, name, torch.empty(parameter.shape))).flatten()[local])


def _sharded_parameters(
    optimizer: DistributedOptimizer, model: list[dict[str, Any]]
) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """The optimizer's parameters with their sharded tensors, in buffer order, the same on all data parallel ranks."""
    sharding = {
        value.data: value for value in nested_values(model) if isinstance(value, ShardedTensor | ShardedTensorFactory)
    }
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            yield parameter, sharding[parameter]


def _local_slice(
    optimizer: DistributedOptimizer,
    parameter: torch.nn.Parameter,
    mains: Mapping[torch.nn.Parameter, torch.Tensor],
) -> tuple[slice, dict[str, torch.Tensor]] | None:
    """The slice of a flattened parameter whose states this rank holds, and these states; None if it holds none."""
    if (main := mains.get(parameter)) is None:
        return None
    local = optimizer._get_model_param_range_map(parameter)["param"]
    return slice(local.start, local.end), {"param": main, **optimizer.optimizer.state[main]}


def _main_parameters(optimizer: DistributedOptimizer) -> dict[torch.nn.Parameter, torch.Tensor]:
    """This rank's float32 slices of master weights, which AdamW changes, each under the model's parameter.

    Parameters without a slice on this rank are left out.
    """
    # `ranges["params"]` has the parameters in the model's order, and the optimizer's group has those in float32 first
    # (distrib_optimizer.py), so the former are sorted like the latter.
    return {
        parameter: main
        for ranges, group in zip(optimizer.opt_group_ranges, optimizer.optimizer.param_groups, strict=True)
        for parameter, main in zip(
            sorted(ranges["params"], key=lambda parameter: parameter.dtype != torch.float32),
            group["params"],
            strict=True,
        )
    }


def _sharded_like(sharded: Any, name: str, data: torch.Tensor) -> Any:
    """Make the sharded tensor of a parameter's optimizer state `name`, with the values `data`.

    Its layout is that of `sharded`, the sharded tensor of the parameter.
    """
    changes: dict[str, Any] = {"key": f"optimizer.{name}.{sharded.key}", "data": data}
    if isinstance(sharded, ShardedTensor):
        changes["dtype"] = data.dtype
    return replace(sharded, **changes)
