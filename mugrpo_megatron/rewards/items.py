"""The records that verifier and workers exchange: inputs and results of a reward function."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from mugrpo_megatron.samples import Problem  # for the type alone: it imports numpy, which a worker does not need

Result = TypeVar("Result")
Row = Mapping[str, Any]
"""A row of the data set as JSON values, with all its columns."""
LARGEST_FLOAT = 3.4e38
"""Largest number of float32, the type in which advantages are computed."""
ChatOrText = str | Sequence[Mapping[str, Any]]
"""A prompt: text, or the messages of a chat, each with `role`, `content` and its other keys in the data."""


def fits_float32(value: float) -> bool:
    """Whether a number is finite as float32; it may be an integer of any size."""
    return abs(value) <= LARGEST_FLOAT  # a comparison with NaN is false


def prompt_of_problem(problem: Problem) -> ChatOrText:
    """The problem's prompt: its messages if it is a chat, else its question."""
    return list(problem.messages) or problem.question


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """A response to score, with the problem that it answers."""

    response: str
    gold: Any
    """The gold in the data, any JSON value."""
    answer: str
    """The gold answer with which `math` compares."""
    row: Row = field(default_factory=dict)
    prompt: ChatOrText = ""
    source: str = ""
    """The problem's `data_source`."""
    ids: Sequence[int] = ()
    """The response's token ids."""
    opening: str = ""
    """The tag with which the prompt opens a thought, such as `<think>`; `response` continues after it."""


class Needs(NamedTuple):
    """The data that a worker needs to call its function, as the worker reports it; other data is not sent."""

    responses: int = 1
    """Most responses that one call of the function may have."""
    row: bool = False
    prompt: bool = False
    ids: bool = False


class Verdict(NamedTuple):
    """The result of one reward function on one response; workers send it over the socket."""

    reward: float | None
    """The reward; None if the function does not apply to this response."""
    extracted: str
    """The extracted answer; empty when none was found or the function does not report it."""
    why: str
    seconds: float = 0.0
    failed: bool = False
    """Whether the function raised, returned no finite number, or exceeded a limit."""
    parts: Mapping[str, float] = {}
    """Other numbers that the function returned, by name."""


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    """Weighted sum of the functions' rewards."""
    extracted: str
    """The extracted answer; empty when none was found or no function reports it."""
    why: str
    seconds: float
    """Time in a worker; 0 when no worker was needed."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Unweighted rewards by the functions' names, and the overlong penalty."""
    missing: bool = False
    """Whether no function applies, or one failed whose weight is not 0. Then `reward` says nothing about the
    response."""
    failed: tuple[str, ...] = ()
    """Names of the functions that failed; `why` has the exception."""


class Pending(Generic[Result]):
    """A future of several results (scores or verdicts), which arrive one by one."""

    def __init__(self, count: int) -> None:
        self._results: list[Result | None] = [None] * count
        self._missing = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._failure: Exception | None = None
        if count == 0:
            self._done.set()

    def result(self, timeout_s: float | None = None) -> list[Result]:
        """Wait for all results and return them in the order of submission.

        Raises TimeoutError after `timeout_s`, or the error that ended the verifier.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(
                f"the verifier has not scored {self._missing} of {len(self._results)} responses in {timeout_s} s"
            )
        if self._failure is not None:
            raise self._failure
        return [result for result in self._results if result is not None]

    def done(self) -> bool:
        return self._done.is_set()

    def put(self, index: int, result: Result) -> None:
        """Set the result with this index; the verifier calls this once for every index."""
        with self._lock:
            self._results[index] = result
            self._missing -= 1
            if self._missing == 0:
                self._done.set()

    def fail(self, error: Exception) -> None:
        """Set the error that ended the verifier."""
        self._failure = error
        self._done.set()
