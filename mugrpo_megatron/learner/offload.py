"""Offload the learner to host memory, so that the engine has the device's memory, and reload it."""

from __future__ import annotations

from typing import Literal

import torch

from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.optimizer import shards
from mugrpo_megatron.learner.pinned import copy_back, move_to_host

Part = Literal["optimizer", "weights"]
"""`optimizer`: master weights, moments and gradients, not needed to sync weights to an engine; `weights`: the rest."""
PARTS: tuple[Part, ...] = ("optimizer", "weights")


def offload(learner: Learner, part: Part) -> None:
    """Move a part of the learner's state to host memory and free it on the device; on CPU there is nothing to free."""
    if learner.ranks.device.type != "cuda" or part in learner.offloaded:
        return
    buffers = [buffer for shard in shards(learner.optimizer) for buffer in shard.buffers]
    if part == "weights":
        learner.offloaded[part] = move_to_host([buffer.param_data for buffer in buffers])
    else:
        learner.offloaded[part] = move_to_host(_states(learner)) + move_to_host(
            [buffer.grad_data for buffer in buffers], keep=False
        )
    torch.cuda.synchronize()  # the copies must finish before another process takes the memory
    torch.cuda.empty_cache()


def reload(learner: Learner) -> None:
    """Move everything that is offloaded back to the device."""
    for copies in learner.offloaded.values():
        copy_back(copies)
    learner.offloaded.clear()


def _states(learner: Learner) -> list[torch.Tensor]:
    """Moments, and master weights unless they are views of the model's weights (as in float32)."""
    found = []
    for shard in shards(learner.optimizer):
        weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in shard.buffers}
        for group in shard.optimizer.param_groups:
            for parameter in group["params"]:
                states = shard.optimizer.state[parameter]
                candidates = [parameter.data, states["exp_avg"], states["exp_avg_sq"]]
                found += [t for t in candidates if t.untyped_storage().data_ptr() not in weights]
    return found
