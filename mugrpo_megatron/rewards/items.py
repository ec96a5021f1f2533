"""Inputs and results of a reward function: the records between the verifier and its workers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mugrpo_megatron.samples import Problem  # numpy, which a worker does without

Row = Mapping[str, Any]
"""A row of the data, every column of it, as JSON has it."""
ChatOrText = str | Sequence[Mapping[str, str]]
"""What the model was asked: a text, or the messages of a chat (`role`, `content`)."""


def prompt_of_problem(problem: Problem) -> ChatOrText:
    """What the model was asked: the messages where the problem is a chat, else the question."""
    return [{"role": role, "content": text} for role, text in problem.messages] or problem.question


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """A response, and all that is known of it."""

    response: str
    gold: Any
    """The gold as the data has it, any JSON value."""
    answer: str
    """What `math` compares the response's answer with."""
    row: Row = field(default_factory=dict)
    prompt: ChatOrText = ""
    source: str = ""
    """The problem's `data_source`."""
    ids: Sequence[int] = ()
    """The response's token ids."""


class Needs(NamedTuple):
    """How a worker's function is called, as the worker reports it: the rest is not sent."""

    responses: int = 1
    """At most so many in one call."""
    row: bool = False
    prompt: bool = False
    ids: bool = False


class Verdict(NamedTuple):
    """What one reward function says of one response; this goes over the socket."""

    reward: float | None
    """None: the function does not apply to this response."""
    extracted: str
    """The answer that was compared; empty when none was found, or when the function does not name it."""
    why: str
    seconds: float = 0.0
    failed: bool = False
    """Whether the function raised, returned something else than a finite number, or ran into a limit."""
    parts: Mapping[str, float] = {}
    """Other numbers that the function returned, by name."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one response."""

    reward: float
    """The weighted sum of what the reward functions gave."""
    extracted: str
    """The answer that was compared; empty when none was found, or when no function names it."""
    why: str
    seconds: float
    """Time in a worker; 0 when no worker was needed."""
    components: Mapping[str, float] = field(default_factory=dict)
    """What each function gave before weights, and the shaping's penalty, by name."""


class Pending:
    """A future of several scores; `result` waits for them and returns them in the order of submission."""

    def __init__(self, count: int) -> None:
        self._scores: list[Score | None] = [None] * count
        self._missing = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._failure: Exception | None = None
        if count == 0:
            self._done.set()

    def result(self, timeout_s: float | None = None) -> list[Score]:
        """Wait for every score. Raises TimeoutError after `timeout_s`, or the error that ended the verifier."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"{self._missing} of {len(self._scores)} responses are not scored after {timeout_s} s")
        if self._failure is not None:
            raise self._failure
        return [score for score in self._scores if score is not None]

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._done.is_set()

    def put(self, place: int, score: Score) -> None:
        """Called by the verifier, once for every place."""
        with self._lock:
            self._scores[place] = score
            self._missing -= 1
            if self._missing == 0:
                self._done.set()

    def fail(self, error: Exception) -> None:
        """Called by the verifier when the missing scores will never come."""
        self._failure = error
        self._done.set()
