"""Communication of a run's ranks outside the learner: barriers, gathers, shared counters.

The class here is for a single process; `run.connected` has the one for several.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from mugrpo_megatron.run.stopping import StopRequest

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """All ranks of a run, and how they communicate; every method is collective unless it says otherwise.

    This class is for a run of one process, which communicates nothing and needs no Megatron; `connected.ConnectedWorld`
    is for several.
    """

    engines: int
    """Number of engines in the run; 0 without generation."""
    stop: StopRequest = field(default_factory=StopRequest)
    rank: int = 0
    size: int = 1

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait without a timeout until every rank has called this; meanwhile call `meanwhile` repeatedly.

        Raises CollectiveFailure once another rank has failed or seems dead.
        """

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        return flag

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on every rank."""
        return value

    def named(self, phase: str) -> AbstractContextManager[None]:
        """In the block, let heartbeats, and errors about lost ranks, name the phase. Not collective."""
        return nullcontext()

    def count(self, counter: str, amount: int) -> int:
        """Add to a counter that all ranks share and return its new value. Not collective."""
        raise NotImplementedError("a run of one process has no counters to share")

    def store_set(self, name: str, text: str) -> None:
        """Store a text for the other ranks. Not collective; any thread may call it."""

    def store_get(self, name: str) -> str:
        """The text that a rank has stored under `name`, empty if none has. Not collective; any thread may call it."""
        return ""
