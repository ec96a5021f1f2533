"""Communication between a run's ranks outside the learner (barriers, gathers, shared counters), and its form for a
single process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from mugrpo_megatron.run.stopping import StopRequest

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """All ranks of a run; every method is collective unless it says otherwise.

    This class is the world of one process, which communicates nothing and needs no Megatron; `connected.ConnectedWorld`
    is that of several.
    """

    engines: int
    """Number of engines in the run; 0 without generation."""
    stop: StopRequest = field(default_factory=StopRequest)
    rank: int = 0
    size: int = 1

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank is here, as long as all of them are alive; `meanwhile` is called repeatedly.

        Raises CollectiveFailure once another rank has failed.
        """

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        return flag

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return value

    def named(self, phase: str) -> AbstractContextManager[None]:
        """Heartbeats and the errors of lost ranks name the phase while the block runs. Not collective."""
        return nullcontext()

    def count(self, counter: str, amount: int) -> int:
        """Add to a counter that all ranks share and return its new value. Not collective."""
        raise NotImplementedError("a run of one process has no counters to share")

    def store_set(self, name: str, text: str) -> None:
        """Store a text for the other ranks. Not collective; any thread may call it."""

    def store_get(self, name: str) -> str:
        """The text that a rank has stored, or an empty one. Not collective; any thread may call it."""
        return ""
