"""Optimizer states in model space: master weights and moments with the shape and sharding of their parameters.

The distributed optimizer keeps flat slices of its buffers. Megatron's conversion to parameters ("fully reshardable")
drops the padding inside buffers and shifts what follows it, which corrupts small or odd-sized parameters, and its
loader does not support torch's AdamW. Here each parameter is converted by itself: peak extra memory is one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

STATES = ("param", "exp_avg", "exp_avg_sq")
"""Master weight, first and second moment."""
States = list[dict[str, Any]]
"""A {state: sharded or plain tensor} for each parameter, in the order of the optimizer's buffers."""


def gather_states(optimizer: DistributedOptimizer, model: list[dict[str, Any]]) -> States:
    """Full float32 states of every parameter, on the CPU, sharded as `model` (sharded state dicts) shards it.

    Collective over the data parallel group, whose ranks each hold a slice of every parameter's states.
    """
    found: States = []
    group = optimizer.data_parallel_group
    for parameter, sharded in _sharded_parameters(optimizer, model):
        slices = _local_slice(optimizer, parameter)
        found.append({})
        for name in STATES:
            whole = torch.zeros(parameter.numel(), device=parameter.device)
            if slices is not None:
                where, states = slices
                whole[where] = states[name].detach()
            if group.size() > 1:
                dist.all_reduce(whole, group=group)  # the slices are disjoint, so the sum is exact
            found[-1][name] = _sharded_like(sharded, name, whole.view(parameter.shape).cpu())
    return found


def empty_states(optimizer: DistributedOptimizer, model: list[dict[str, Any]]) -> States:
    """Empty states of every parameter, to read a checkpoint into."""
    return [
        {name: _sharded_like(sharded, name, torch.empty(parameter.shape)) for name in STATES}
        for parameter, sharded in _sharded_parameters(optimizer, model)
    ]


def scatter_states(optimizer: DistributedOptimizer, states: States) -> None:
    """Copy this rank's slice of full states (plain tensors) into the optimizer."""
    parameters = [parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map]
    for parameter, full in zip(parameters, states, strict=True):
        slices = _local_slice(optimizer, parameter)
        if slices is not None:
            where, held = slices
            for name in STATES:
                held[name].copy_(full[name].flatten()[where])


def _sharded_parameters(
    optimizer: DistributedOptimizer, model: list[dict[str, Any]]
) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """The optimizer's parameters in buffer order, the same on all data parallel ranks, with how each is sharded."""
    sharding = {
        value.data: value for value in nested_values(model) if isinstance(value, ShardedTensor | ShardedTensorFactory)
    }
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            yield parameter, sharding[parameter]


def _local_slice(
    optimizer: DistributedOptimizer, parameter: torch.nn.Parameter
) -> tuple[slice, dict[str, torch.Tensor]] | None:
    """The slice of a flattened parameter whose states this rank holds, with the states; None without a slice."""
    if parameter not in optimizer.model_param_gbuf_map:
        return None
    within = optimizer._get_model_param_range_map(parameter)["param"]
    group, order = optimizer.model_param_group_index_map[parameter]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    return slice(within.start, within.end), {"param": main, **optimizer.optimizer.state[main]}


def _sharded_like(sharded: Any, name: str, data: torch.Tensor) -> Any:
    """`data` sharded like the parameter, under the state's key."""
    changes: dict[str, Any] = {"key": f"optimizer.{name}.{sharded.key}", "data": data}
    if isinstance(sharded, ShardedTensor):
        changes["dtype"] = data.dtype
    return replace(sharded, **changes)
