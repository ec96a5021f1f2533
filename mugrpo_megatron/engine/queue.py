"""One queue of prompts for all engines: an engine that has room claims groups by adding to a shared counter.

Every engine's leader has the same list of the stage's groups that are still to be sampled. Adding n to the counter
`claimed` claims the next n groups of the list. An engine with long responses claims fewer groups, so it delays no
other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Add = Callable[[str, int], int]
"""(counter, amount) -> the counter's new value; atomic over all engines."""

CLAIM = 64
"""The largest number of groups that an engine claims at once."""


class PromptQueue:
    """One engine's view of the queue of groups that a round of generation has to sample."""

    def __init__(self, groups: Sequence[int], engines: int = 1, add: Add | None = None) -> None:
        """Make the queue of `groups`, the same on every engine.

        `add` adds to counters that all engines share; without it this is the only engine.
        """
        self._groups = groups
        self._engines = engines
        self._add = add or _local_counters()
        self._exhausted = not groups

    @property
    def total(self) -> int:
        return len(self._groups)

    def take(self, in_flight: int, slots: int) -> list[int]:
        """Claim the next groups for an engine that has `in_flight` unfinished groups and decodes `slots` together.

        Returns an empty list if the engine should claim nothing now. If no group is in flight then, its round is over.
        """
        if self._exhausted:
            return []
        unclaimed = len(self._groups) - self._add("claimed", 0)
        # An engine holds twice what it decodes, so that it never waits for the queue. Once the remaining groups fit
        # into the slots of all engines, it holds only what it decodes: a group that waits inside one engine could run
        # in a free slot of another.
        plenty = unclaimed >= self._engines * slots
        depth = 2 * slots if plenty else min(slots, -(-len(self._groups) // self._engines))
        room = min(depth - in_flight, CLAIM)
        if room <= 0:
            return []
        if 2 * self._add("out", 0) >= self._engines:
            self._exhausted = True
            return []
        end = self._add("claimed", room)
        self._exhausted = end >= len(self._groups)
        return list(self._groups[end - room : end])

    def leave(self) -> None:
        """Report that this engine has failed. Once half of the engines have failed, none claims any more groups.

        All engines are then started again together.
        """
        self._add("out", 1)

    def close(self) -> None:
        """Let no engine claim groups any more, because the run was asked to stop."""
        self._add("out", self._engines)

    def finished(self, tokens: int) -> None:
        self._add("groups", 1)
        self._add("tokens", tokens)

    def totals(self) -> tuple[int, int]:
        """The numbers of groups and tokens that all engines together have finished in this round (`finished`)."""
        return self._add("groups", 0), self._add("tokens", 0)


def _local_counters() -> Add:
    counters: Counter[str] = Counter()

    def add(name: str, amount: int) -> int:
        counters[name] += amount
        return counters[name]

    return add


MOST_LOADS = 240
"""The largest number of readings that a `LoadRecord` keeps."""


@dataclass(frozen=True, slots=True)
class LoadReading:
    at: float
    """Time in seconds of the monotonic clock, which the engine's host and its leader share, being on one machine."""
    tokens: int
    """Tokens sampled since the generation began, unfinished responses included."""
    running: int
    """Number of requests that are being decoded."""
    queued: int
    """Number of requests that wait inside the engine."""
    kv_use: float
    """Fraction of the KV cache in use."""

    def metrics(self) -> dict[str, float]:
        """The reading as fields of a row of the metric log, without the time."""
        return {"tokens": self.tokens, "running": self.running, "queued": self.queued, "kv_use": self.kv_use}


def read_load(tokens: int, snapshots: Sequence[Any]) -> LoadReading:
    """The load of an engine or its replicas, from SGLang's snapshots of all schedulers.

    Requests are summed over the schedulers, and `kv_use` is the largest of any scheduler.
    """
    return LoadReading(
        at=time.monotonic(),
        tokens=tokens,
        running=sum(snapshot.num_running_reqs for snapshot in snapshots),
        queued=sum(snapshot.num_waiting_reqs for snapshot in snapshots),
        kv_use=max((float(snapshot.token_usage) for snapshot in snapshots), default=0.0),
    )


@dataclass(slots=True)
class LoadRecord:
    """Readings of the load over one generation, at most `MOST_LOADS`, at equal intervals.

    When there are too many, every second one is dropped, and from then on only every second new one is kept.
    """

    loads: list[LoadReading] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, load: LoadReading) -> None:
        if self._seen % self._every == 0:
            self.loads.append(load)
        self._seen += 1
        if len(self.loads) > MOST_LOADS:
            del self.loads[1::2]
            self._every *= 2
