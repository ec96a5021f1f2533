"""An engine's load while it generates: requests that run and wait, use of the KV cache, tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_LOADS = 240
"""Readings that a record keeps of one generation, however long it takes."""


@dataclass(frozen=True, slots=True)
class Load:
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


def read_load(tokens: int, snapshots: Sequence[Any]) -> Load:
    """The engine's load from what its schedulers have published, one snapshot for each that works on its own data."""
    return Load(
        time=time.time(),
        tokens=tokens,
        running=sum(one.num_running_reqs for one in snapshots),
        queued=sum(one.num_waiting_reqs for one in snapshots),
        kv_use=max((float(one.token_usage) for one in snapshots), default=0.0),
    )


@dataclass(slots=True)
class LoadRecord:
    """Readings of one generation, evenly spread: when there are too many, every second one is dropped."""

    loads: list[Load] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, load: Load) -> None:
        if self._seen % self._every == 0:
            self.loads.append(load)
        self._seen += 1
        if len(self.loads) > MOST_LOADS:
            del self.loads[1::2]
            self._every *= 2
