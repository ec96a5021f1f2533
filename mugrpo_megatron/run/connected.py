"""Communication of several ranks: by gloo, or by torch's rendezvous store where a collective could time out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from mugrpo_megatron.errors import CollectiveFailure
from mugrpo_megatron.learner.groups import Ranks, named_phase
from mugrpo_megatron.learner.heartbeat import Heartbeat, rank_list
from mugrpo_megatron.run.stopping import Stopped, StopRequest
from mugrpo_megatron.run.world import World

T = TypeVar("T")
STOP_PATIENCE_S = 18.0
"""The longest time that a stopping rank waits for a rank that seems dead: 30 s after a rank's death torchrun kills the
others."""
STOP, FAILED = "run/stop", "run/failed"
"""Keys of the rendezvous store: how many ranks were asked to stop; the error of a rank that failed."""


@dataclass(frozen=True, kw_only=True)
class ConnectedWorld(World):
    """Several ranks, which the learner's process groups connect."""

    ranks: Ranks
    group: dist.ProcessGroup
    """A gloo group of all ranks."""

    @property
    def heartbeat(self) -> Heartbeat:
        assert self.ranks.heartbeat
        return self.ranks.heartbeat

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        # The barrier uses the store and not NCCL or gloo, because an engine's start or a long generation takes longer
        # than a collective's timeout. Heartbeats tell a slow rank from a dead one.
        stop_time = float("inf")

        def on_poll() -> None:
            nonlocal stop_time
            meanwhile()
            if not self.stop.poll():
                return
            stop_time = min(stop_time, time.monotonic())
            waited_s = time.monotonic() - stop_time
            # A stopping rank waits less long for a missing heartbeat, because it has to save before torchrun kills it.
            if waited_s > STOP_PATIENCE_S and (silent := self.heartbeat.missed()):
                raise _failure(self.ranks, f"the run stops, and there is no heartbeat from {rank_list(silent)}")

        self.heartbeat.barrier(on_poll)

    def any_rank(self, flag: bool) -> bool:
        answer = torch.tensor(flag, dtype=torch.int32)
        with named_phase(self.ranks):
            dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.group)
        return bool(answer)

    def gather(self, value: T) -> list[T]:
        values = [value] * self.size
        with named_phase(self.ranks):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        values = [value]
        with named_phase(self.ranks):
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def named(self, phase: str) -> AbstractContextManager[None]:
        return named_phase(self.ranks, phase)

    def count(self, counter: str, amount: int) -> int:
        return self.heartbeat.ask(lambda store: store.add(counter, amount))

    def store_set(self, name: str, text: str) -> None:
        self.heartbeat.ask(lambda store: store.set(name, text))

    def store_get(self, name: str) -> str:
        return self.heartbeat.ask(lambda store: store.get(name).decode() if store.check([name]) else "")


def open_world(ranks: Ranks, timeout_s: float, engines: int, stop: StopRequest) -> World:
    """Make the world of the ranks that the learner's process groups connect. Collective.

    From then on `stop.poll` also finds requests to stop that other ranks got. `timeout_s` is a collective's timeout.
    """
    if ranks.world == 1:
        return World(engines=engines, stop=stop)
    # gloo is used on GPUs too: objects stay on the host, and a hung NCCL communicator of the learner cannot block a
    # stop.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    stop.peers = lambda announce: _any_rank_asked(ranks, announce)
    return ConnectedWorld(engines=engines, stop=stop, rank=ranks.rank, size=ranks.world, ranks=ranks, group=group)


@contextmanager
def broadcast_failure(ranks: Ranks) -> Iterator[None]:
    """If an exception in the block ends this rank, tell the other ranks, so that they do not wait for it."""
    try:
        yield
    except (Stopped, CollectiveFailure):  # the other ranks know of this failure or stop already
        raise
    except Exception as error:
        text = f"rank {ranks.rank} failed: {(str(error) or type(error).__name__).splitlines()[0]}"
        if ranks.heartbeat:
            with suppress(CollectiveFailure):
                ranks.heartbeat.ask(lambda store: store.set(FAILED, text))
        raise


def _any_rank_asked(ranks: Ranks, announce: bool) -> bool:
    """Whether any rank was asked to stop; with `announce`, the others learn from now on that this rank was.

    Raises CollectiveFailure when a rank has failed.
    """

    def read(store: dist.Store) -> tuple[int, str]:
        return store.add(STOP, int(announce)), store.get(FAILED).decode() if store.check([FAILED]) else ""

    assert ranks.heartbeat
    requests, failed = ranks.heartbeat.ask(read)
    if failed:
        raise _failure(ranks, failed)
    return requests > 0


def _failure(ranks: Ranks, cause: str) -> CollectiveFailure:
    assert ranks.heartbeat
    return CollectiveFailure(f"rank {ranks.rank} of {ranks.world} ends in {ranks.heartbeat.doing}: {cause}")
