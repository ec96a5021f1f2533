"""What the ranks of a run do together outside the learner: barriers, reductions, gathers, shared counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from mugrpo_megatron.errors import CollectiveFailure
from mugrpo_megatron.learner.groups import Ranks, named_phase
from mugrpo_megatron.learner.heartbeat import rank_list
from mugrpo_megatron.run.stopping import Stopped, StopRequest

T = TypeVar("T")
STOP_PATIENCE_S = 18.0
"""A rank that was asked to stop gives up a dead one after this time: torchrun kills it 30 s after the other's death."""
MISSED_BEAT_S = 9.0
"""A rank has missed a heartbeat: they come every 10 s at most."""
STOP, FAILED = "run/stop", "run/failed"
"""Keys of the rendezvous store: how many ranks were asked to stop, and how a failing rank ended."""


@dataclass(frozen=True)
class World:
    """All ranks of a run; every method is collective unless it says otherwise. A world of one communicates nothing."""

    ranks: Ranks
    group: dist.ProcessGroup | None
    """All ranks over gloo, also where the learner's collectives run over NCCL; None in a world of one."""
    engines: int
    """Engines of all ranks together; 0 in a run that does not generate."""
    stop: StopRequest = field(default_factory=StopRequest)

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank is here, as long as all of them are alive; `meanwhile` is called repeatedly.

        Raises CollectiveFailure once another rank has failed. A rank that was asked to stop is less patient with a rank
        whose heartbeat is missing.
        """
        heartbeat = self.ranks.heartbeat
        if heartbeat is None:
            return

        heard_at: list[float] = []

        def look() -> None:
            meanwhile()
            if not self.stop.poll():
                return
            heard_at.extend([] if heard_at else [time.monotonic()])
            waited_s = time.monotonic() - heard_at[0]
            if waited_s > STOP_PATIENCE_S and (silent := heartbeat.silent(MISSED_BEAT_S)):
                raise _failure(self.ranks, f"the run stops, and there is no heartbeat from {rank_list(silent)}")

        heartbeat.barrier(look)

    def any_rank(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank: the same answers everywhere."""
        answers = torch.tensor(flags, dtype=torch.int32)
        if self.group:
            with named_phase(self.ranks):
                dist.all_reduce(answers, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in answers]

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

    def store_set(self, name: str, text: str) -> None:
        """Leave a text for the other ranks. Not collective; any thread may call it."""
        assert self.ranks.heartbeat
        self.ranks.heartbeat.ask(lambda store: store.set(name, text))

    def store_get(self, name: str) -> str:
        """The text that a rank has stored, empty if none has. Not collective; any thread may call it."""
        assert self.ranks.heartbeat
        return self.ranks.heartbeat.ask(lambda store: store.get(name).decode() if store.check([name]) else "")


def open_world(ranks: Ranks, timeout_s: float, engines: int, stop: StopRequest) -> World:
    """The world of the ranks that the learner's process groups already connect; `stop` hears of requests to others."""
    if ranks.world == 1:
        return World(ranks, None, engines, stop)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    stop.others = lambda tell: _others_asked(ranks, tell)
    return World(ranks, group, engines, stop)


@contextmanager
def broadcast_failure(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks of an exception that ends this one, so that none of them waits for it."""
    try:
        yield
    except (Stopped, CollectiveFailure):  # others stop or fail too
        raise
    except Exception as error:
        text = f"rank {ranks.rank} failed: {(str(error) or type(error).__name__).splitlines()[0]}"
        if ranks.heartbeat:
            with suppress(CollectiveFailure):
                ranks.heartbeat.ask(lambda store: store.set(FAILED, text))
        raise


def _others_asked(ranks: Ranks, tell: bool) -> bool:
    """Whether a rank was asked to stop, this one with `tell`; CollectiveFailure when one has failed."""

    def look(store: dist.Store) -> tuple[int, str]:
        return store.add(STOP, int(tell)), store.get(FAILED).decode() if store.check([FAILED]) else ""

    assert ranks.heartbeat
    requests, failed = ranks.heartbeat.ask(look)
    if failed:
        raise _failure(ranks, failed)
    return requests > 0


def _failure(ranks: Ranks, cause: str) -> CollectiveFailure:
    assert ranks.heartbeat
    return CollectiveFailure(f"rank {ranks.rank} of {ranks.world} ends in {ranks.heartbeat.doing}: {cause}")
