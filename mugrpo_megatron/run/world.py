"""What the ranks of a run do together outside the learner: barriers, reductions, gathers, shared counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from mugrpo_megatron.learner.groups import Ranks, named_phase

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """All ranks of a run; every method is collective unless it says otherwise. A world of one communicates nothing."""

    ranks: Ranks
    group: dist.ProcessGroup | None
    """All ranks over gloo, also where the learner's collectives run over NCCL; None in a world of one."""
    engines: int
    """Engines of all ranks together; 0 in a run that does not generate."""

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank is here, as long as all of them are alive; `meanwhile` is called repeatedly."""
        if self.ranks.heartbeat:
            self.ranks.heartbeat.barrier(meanwhile)

    def any_rank(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank: the same answers everywhere."""
        found = torch.tensor(flags, dtype=torch.int32)
        if self.group:
            with named_phase(self.ranks):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in found]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        values = [value] * self.ranks.world
        if self.group:
            with named_phase(self.ranks):
                dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        values = [value]
        if self.group:
            with named_phase(self.ranks):
                dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def count(self, counter: str, amount: int) -> int:
        """Add to a counter that all ranks share and return its new value. Not collective."""
        assert self.ranks.heartbeat
        return self.ranks.heartbeat.ask(lambda store: store.add(counter, amount))


def open_world(ranks: Ranks, timeout_s: float, engines: int) -> World:
    """The world of the ranks that the learner's process groups already connect."""
    if ranks.world == 1:
        return World(ranks, None, engines)
    return World(ranks, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)), engines)
