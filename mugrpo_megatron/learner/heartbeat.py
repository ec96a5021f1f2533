"""Heartbeats in the rendezvous store: the ranks that are alive, and the phase of each.

A collective notices a dead peer by its timeout. During generation, ranks wait for hours without a collective; the
heartbeats tell a waiting rank whether the others are alive. One thread makes all calls to the store, because a call
over a broken link may block for a quarter of an hour. A caller waits at most `patience_s` for that thread, and then
fails with a message that names every rank's last heartbeat. Over NCCL a lost peer raises nothing: the rank waits in
CUDA until NCCL's time limit, which aborts the process. So over NCCL a second thread ends the rank, with such a message.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Container
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch.distributed as dist

from mugrpo_megatron.errors import CollectiveFailure

T = TypeVar("T")
BEATS_IN_PATIENCE = 10
LONGEST_BEAT_S = 5.0
BARRIER_POLL_S = 0.02
MISSED_BEATS = 1.5
"""Number of intervals without a new heartbeat after which one counts as missed. A heartbeat may reach the store just
after this rank reads it, and is then found one interval later."""
LOST_BEATS = 24
"""Number of intervals without a heartbeat after which a rank counts as lost. By default that is 2 minutes: no call
keeps Python from sending heartbeats for that long."""
CLEANUP_S = 60.0
"""Seconds after a barrier in which the main thread may report a lost rank and clean up, before the watching thread ends
the process."""


@dataclass(frozen=True, slots=True)
class LastBeat:
    node: str
    note: str
    beat: int
    at: float
    """Time at which this rank first saw the heartbeat, on this rank's monotonic clock."""
    left: bool
    """Whether it is the last heartbeat of a rank that has finished."""


class Heartbeat:
    """Writes this rank's heartbeat to the rendezvous store, reads those of all ranks, and says which ranks are lost."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        node: str,
        patience_s: float,
        on_loss: Callable[[str], None] | None = None,
    ) -> None:
        """Start the heartbeat's thread; every rank of the world does this. `node` names this rank's machine in
        messages. `patience_s` is the longest wait for the store, and for a silent rank in a barrier.

        If a rank or the store is lost, `on_loss` is called once, in a thread of its own, with the text of `loss`.
        """
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._rank, self._world, self._node, self._patience_s = rank, world, node, patience_s
        self._interval = min(LONGEST_BEAT_S, patience_s / BEATS_IN_PATIENCE)
        self._beats, self._barriers = 0, 0
        self.doing = "start"
        """Phase of this rank, as its heartbeat reports it."""
        self._last: dict[int, LastBeat] = {}
        # A rank without a heartbeat counts as silent since this moment. Otherwise a rank that ends before its first
        # heartbeat would be waited for without end.
        self._begin = self._read_at = time.monotonic()
        self._requests: queue.Queue[tuple[Callable[[dist.Store], Any], Future[Any]]] = queue.Queue()
        self._leaving = threading.Event()
        self._left = False
        self._excused_until = 0.0
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        if on_loss:
            threading.Thread(target=self._watch, args=(on_loss,), name="monitor", daemon=True).start()

    def note(self, what: str) -> None:
        self.doing = what

    def leave(self, failed: bool = False) -> None:
        """Stop the heartbeat. The other ranks will count this one as lost only if it has `failed`."""
        self._left = not failed
        self._leaving.set()
        self._requests.put((lambda store: None, Future()))  # an empty request, which wakes the thread
        self._thread.join(self._interval)

    def ask(self, operation: Callable[[dist.Store], T]) -> T:
        """Run a short operation on the store in the heartbeat's thread, and return its result.

        Raises CollectiveFailure when the store cannot be reached.
        """
        future: Future[T] = Future()
        self._requests.put((operation, future))
        try:
            return future.result(self._patience_s)
        except (TimeoutError, RuntimeError) as error:
            raise self._failure(
                "the rendezvous on rank 0's node cannot be reached: rank 0 ended, and its log says why, or the network "
                "between the nodes failed"
            ) from error

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait, without a time limit, until every rank has called this, and call `meanwhile` repeatedly.

        Raises CollectiveFailure when a rank sends no heartbeat for `patience_s`, or the store cannot be reached.
        """
        key = f"heartbeat/barrier/{self._barriers}"
        self._barriers += 1
        self._excused_until = math.inf
        try:
            arrived = self.ask(lambda store: store.add(key, 1))
            while arrived < self._world:
                if silent := self.silent(self._patience_s):
                    raise self._failure(f"no heartbeat from {rank_list(silent)} for {self._patience_s:g} s")
                meanwhile()
                self._leaving.wait(BARRIER_POLL_S * max(1, self._world // 16))
                arrived = self.ask(lambda store: store.add(key, 0))
        finally:
            self._excused_until = time.monotonic() + CLEANUP_S

    def missed(self) -> list[int]:
        """The ranks whose newest heartbeat did not come when it was due; they may be dead, or slow."""
        return self.silent(MISSED_BEATS * self._interval)

    def silent(self, seconds: float) -> list[int]:
        """The ranks without a new heartbeat for over `seconds` when this rank last read the store."""
        begins = {rank: self._last[rank].at if rank in self._last else self._begin for rank in range(self._world)}
        return [rank for rank, heard in begins.items() if self._read_at - heard > seconds]

    def likely_cause(self) -> str:
        """Why a collective has probably failed: ranks without heartbeat, or a lost store; empty if neither is known."""
        return self._missing(2 * self._interval, range(self._world))

    def loss(self) -> str:
        """The message that a rank or the store is lost, with every rank's last heartbeat; empty if all are there.

        A rank that has not finished counts as lost after `LOST_BEATS` intervals without a heartbeat, or after
        `patience_s` if that is shorter.
        """
        working = [rank for rank in range(self._world) if rank not in self._last or not self._last[rank].left]
        cause = self._missing(min(self._patience_s, LOST_BEATS * self._interval), working)
        return str(self._failure(cause)) if cause else ""

    def _missing(self, seconds: float, ranks: Container[int]) -> str:
        """A sentence about those of `ranks` that sent no heartbeat for over `seconds`, or about the store if it was out
        of reach so long; empty if neither happened."""
        unread_s = time.monotonic() - self._read_at
        if unread_s > seconds:
            return f"the rendezvous on rank 0's node was out of reach for {unread_s:.0f} s: it ended or was cut off"
        if silent := [rank for rank in self.silent(seconds) if rank in ranks]:
            return f"no heartbeat from {rank_list(silent)} for over {seconds:.0f} s: dead, stopped or cut off"
        return ""

    def last_heard(self) -> str:
        """Text about every rank's last heartbeat: its phase, and how many seconds ago it came.

        Consecutive ranks of one node in the same phase are named together, with the largest number of seconds.
        """
        now = time.monotonic()

        def state(rank: int) -> tuple[str, str, bool]:
            last = self._last[rank]
            return last.node, last.note, rank != self._rank and now - last.at > 2 * self._interval

        descriptions = []
        for (node, doing, quiet), group in groupby(sorted(self._last), key=state):
            ranks = list(group)
            age = f"{max(now - self._last[rank].at for rank in ranks):.0f} s"
            heard = f"silent for {age}" if quiet else f"{age} ago"
            descriptions.append(f"{rank_list(ranks)} ({node}): {doing}{'' if ranks == [self._rank] else f', {heard}'}")
        if never := [rank for rank in range(self._world) if rank not in self._last]:
            descriptions.append(f"{rank_list(never)}: never heard")
        return "; ".join(descriptions)

    def _failure(self, cause: str) -> CollectiveFailure:
        return CollectiveFailure(
            f"rank {self._rank} of {self._world} failed in {self.doing}: {cause}; last heard: {self.last_heard()}"
        )

    def _watch(self, on_loss: Callable[[str], None]) -> None:
        """Call `on_loss` once when a rank or the store is lost.

        It is called neither during a barrier, which raises an error itself, nor for `CLEANUP_S` seconds after one.
        """
        while not self._leaving.wait(self._interval):
            if time.monotonic() > self._excused_until and (account := self.loss()):
                on_loss(account)
                return

    def _run(self) -> None:
        due = 0.0
        while not self._leaving.is_set():
            try:
                if time.monotonic() >= due:
                    due = time.monotonic() + self._interval
                    self._exchange()
                operation, future = self._requests.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            except RuntimeError:  # the store is gone; the next `ask` fails with the reason
                self._leaving.wait(self._interval)
                continue
            try:
                future.set_result(operation(self._store))
            except RuntimeError as error:
                future.set_exception(error)
        # A last heartbeat that says this rank has left; without a store nobody can read it.
        with suppress(RuntimeError):
            self._exchange()

    def _exchange(self) -> None:
        """Write this rank's heartbeat and read the last one of every rank that has sent one."""
        self._beats += 1
        beat = {"node": self._node, "note": self.doing, "beat": self._beats, "left": self._left}
        self._store.set(f"heartbeat/{self._rank}", json.dumps(beat))
        known = self._last.keys()
        ranks = [rank for rank in range(self._world) if rank in known or self._store.check([f"heartbeat/{rank}"])]
        beats = self._store.multi_get([f"heartbeat/{rank}" for rank in ranks])
        now = time.monotonic()
        for rank, beat in zip(ranks, map(json.loads, beats), strict=True):
            before = self._last.get(rank)
            at = before.at if before and before.beat == beat["beat"] else now
            self._last[rank] = LastBeat(beat["node"], beat["note"], beat["beat"], at, beat["left"])
        self._read_at = now


def rank_list(ranks: list[int]) -> str:
    """Ranks as text: "rank 3"; "ranks 0-3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(spans)
