"""What the verifier returns: a score, and a future of several scores."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


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
    well_formed: bool | None = None
    """Whether the response matches `reward.format_pattern` exactly once; None without `reward.format_weight`."""
    components: Mapping[str, float] = field(default_factory=dict)
    """What each function gave, and each term of the shaping, by name and before weights."""


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
