"""Optimizer states in model space: master weights and moments with the shape and sharding of their parameters.

The distributed optimizer keeps flat slices of its buffers. Megatron's conversion to parameters ("fully reshardable")
drops the padding inside buffers and shifts what follows it, which corrupts small or odd-sized parameters, and its
loader does not support torch's AdamW. Here each parameter is converted by itself: peak extra memory is one parameter.
Every data parallel rank writes a share of the parameters, with their weights and states, and reads the parameters of
which it holds a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mugrpo_megatron.learner.packing import fill

STATES = ("param", "exp_avg", "exp_avg_sq")
"""Master weight, first and second moment."""


def writers(sizes: Sequence[int], ranks: int) -> list[int]:
    """For parameters of `sizes` elements, which of the data parallel `ranks` writes each: about equal shares."""
    found = [0] * len(sizes)
    for rank, share in enumerate(fill(sizes, ranks)[0]):
        for index in share:
            found[index] = rank
    return found


def share_writing(optimizer: DistributedOptimizer, model: list[dict[str, Any]]) -> None:
    """Make the `writers` of the optimizer's parameters their main replicas in `model` (sharded state dicts).

    Megatron's main replica is the first data parallel rank, which would then write everything alone. A replica is named
    by its pipeline, tensor and data parallel place; the last of them is now counted from the writer.
    """
    group = optimizer.data_parallel_group
    parameters = list(_sharded_parameters(optimizer, model))
    places = writers([parameter.numel() for parameter, _ in parameters], group.size())
    for (_, sharded), writer in zip(parameters, places, strict=True):
        sharded.replica_id = (*sharded.replica_id[:-1], (group.rank() - writer) % group.size())


def gather_states(
    optimizer: DistributedOptimizer, model: list[dict[str, Any]], to_host: Callable[[torch.Tensor], torch.Tensor]
) -> list[Any]:
    """Full float32 states of the parameters that this rank writes, by `to_host`, sharded as `model` shards them.

    Collective over the data parallel group, whose ranks each hold a slice of every parameter's states. `model` comes
    from `share_writing`; of a parameter that is stored by other groups of ranks, nothing is gathered.
    """
    found = []
    group = optimizer.data_parallel_group
    for parameter, sharded in _sharded_parameters(optimizer, model):
        if any(sharded.replica_id[:-1]):
            continue
        slices = _local_slice(optimizer, parameter)
        for name in STATES:
            whole = torch.zeros(parameter.numel(), device=parameter.device)
            if slices is not None:
                where, states = slices
                whole[where] = states[name].detach()
            if group.size() > 1:
                writer = (group.rank() - sharded.replica_id[-1]) % group.size()
                dist.reduce(whole, group=group, group_dst=writer)  # the slices are disjoint, so the sum is exact
            if is_main_replica(sharded.replica_id):
                found.append(_sharded_like(sharded, name, to_host(whole.view(parameter.shape))))
    return found


def read_states(
    optimizer: DistributedOptimizer, model: list[dict[str, Any]], read: Callable[[Any], torch.Tensor]
) -> None:
    """Copy this rank's slice of every parameter's states from a checkpoint into the optimizer.

    `read` fills a sharded state and returns its tensor. It is called for one state at a time, and only for parameters
    of which this rank holds a slice. Not collective.
    """
    for parameter, sharded in _sharded_parameters(optimizer, model):
        slices = _local_slice(optimizer, parameter)
        if slices is not None:
            where, held = slices
            for name in STATES:
                held[name].copy_(read(_sharded_like(sharded, name, torch.empty(parameter.shape))).flatten()[where])


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
