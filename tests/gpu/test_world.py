"""The process groups of a world of one, which every run on one device starts with."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from mugrpo_megatron.learner.groups import initialize, shutdown
from tests.gpu.tiny import CUDA, DEVICE
from tests.learner import tiny


def test_a_world_of_one_has_device_groups_and_host_groups(tmp_path: Path) -> None:
    """NCCL (gloo on a CPU) over a store without a port, subgroups of it, and gloo beside it for the checkpoint."""
    recipe = tiny.recipe(tmp_path)
    ranks = initialize(recipe.run, recipe.parallel)
    assert dist.get_backend() == ("nccl" if CUDA else "gloo")
    engine_group, _ = dist.new_subgroups(1)
    host_group = dist.new_group(backend="gloo")
    numbers = torch.arange(4.0, device=DEVICE)
    for group in (None, engine_group):
        dist.all_reduce(numbers, group=group)
    every = torch.empty_like(numbers)
    dist.all_gather_into_tensor(every, numbers)
    names: list[str] = [""]
    dist.all_gather_object(names, "here", group=host_group)
    shutdown(ranks)
    assert every.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert names == ["here"]
