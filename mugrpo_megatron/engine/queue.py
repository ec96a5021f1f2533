"""One queue of prompts for all engines: they claim groups from a shared counter as they have capacity.

There is no dispatcher. Every leader holds the same list of the groups that a stage lacks; a leader that adds n to the
counter `claimed` owns the n groups that the counter passed. An engine with long responses claims fewer, so it delays
no other engine.
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
"""Most groups claimed at once."""


class PromptQueue:
    """The groups of one round of generation, as one engine sees them; `add` connects it to the other engines."""

    def __init__(self, groups: Sequence[int], engines: int = 1, add: Add | None = None) -> None:
        """`groups` are the same on every engine; without `add` this is the only engine."""
        self._groups = groups
        self._engines = engines
        self._add = add or _counters_of_one()
        self._exhausted = not groups

    @property
    def total(self) -> int:
        """Groups of this round."""
        return len(self._groups)

    def take(self, held: int, slots: int) -> list[int]:
        """The next groups of an engine that holds `held` unfinished ones and decodes `slots` together.

        While many groups are left, an engine holds twice what it decodes, so that it never waits for the queue. Once
        the rest fits into the engines' slots, it holds only what it decodes: a group that would wait inside one engine
        is better left to the next engine with a free slot. A round that fits into the slots from its start is shared
        evenly. Returns an empty list when there is nothing to take now, and with `held` = 0 when the round is over.
        """
        if self._exhausted:
            return []
        unclaimed = len(self._groups) - self._add("claimed", 0)
        plenty = unclaimed >= self._engines * slots
        depth = 2 * slots if plenty else min(slots, -(-len(self._groups) // self._engines))
        room = min(depth - held, CLAIM)
        if room <= 0:
            return []
        if 2 * self._add("out", 0) >= self._engines:
            self._exhausted = True
            return []
        end = self._add("claimed", room)
        self._exhausted = end >= len(self._groups)
        return list(self._groups[end - room : end])

    def leave(self) -> None:
        """Report that this engine failed. Once half of the engines have, all stop claiming, to restart together."""
        self._add("out", 1)

    def close(self) -> None:
        """Stop all engines' claims: the run was asked to stop."""
        self._add("out", self._engines)

    def finished(self, tokens: int) -> None:
        """Count a finished group and its tokens."""
        self._add("groups", 1)
        self._add("tokens", tokens)

    def totals(self) -> tuple[int, int]:
        """Groups and tokens that all engines together have finished in this round."""
        return self._add("groups", 0), self._add("tokens", 0)


def _counters_of_one() -> Add:
    counters: Counter[str] = Counter()

    def add(name: str, amount: int) -> int:
        counters[name] += amount
        return counters[name]

    return add


MOST_LOADS = 240
"""Readings that a record keeps of one generation, however long it takes."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One reading."""

    time: float
    """Unix seconds."""
    tokens: int
    """Sampled since the generation began, those of unfinished responses included."""
    running: int
    """Requests that are decoded together."""
    queued: int
    """Requests that the engine holds and does not decode yet."""
    kv_use: float
    """Share of the KV cache that holds tokens."""

    def metrics(self) -> dict[str, float]:
        """What a row of the metric log says of it, besides its time."""
        return {"tokens": self.tokens, "running": self.running, "queued": self.queued, "kv_use": self.kv_use}


def read_load(tokens: int, snapshots: Sequence[Any]) -> EngineLoad:
    """The engine's load from what its schedulers have published, one snapshot for each that works on its own data."""
    return EngineLoad(
        time=time.time(),
        tokens=tokens,
        running=sum(one.num_running_reqs for one in snapshots),
        queued=sum(one.num_waiting_reqs for one in snapshots),
        kv_use=max((float(one.token_usage) for one in snapshots), default=0.0),
    )


@dataclass(slots=True)
class LoadRecord:
    """Readings of one generation, evenly spread: when there are too many, every second one is dropped."""

    loads: list[EngineLoad] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, load: EngineLoad) -> None:
        if self._seen % self._every == 0:
            self.loads.append(load)
        self._seen += 1
        if len(self.loads) > MOST_LOADS:
            del self.loads[1::2]
            self._every *= 2
