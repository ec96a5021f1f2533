"""An engine's load while it generates: requests that run and wait, use of the KV cache, tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

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
