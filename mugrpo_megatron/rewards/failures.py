"""Counts the failures of a user's reward function, and ends the run when there are too many."""

from __future__ import annotations

from collections import deque

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import CODE, RewardSection

FIRST = 16
WINDOW = 10_000
_SHOWN = 60
"""Characters of a response and a gold in the message."""


class FailureCount:
    """The failures among the latest WINDOW responses."""

    def __init__(self, section: RewardSection, title: str = "reward.function") -> None:
        """`title` is what the message calls the function."""
        self._section, self._title = section, title
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._failures = 0

    def add(self, failed: bool, why: str, response: str, gold: object) -> None:
        """Count one response; UserError when the failures exceed `reward.max_failure_share`.

        Their share is of at least FIRST responses: with the default of 1 %, any failure in the first 99 responses
        ends the run.
        """
        if len(self._failed) == WINDOW:
            self._failures -= self._failed[0]
        self._failed.append(failed)
        self._failures += failed
        share = self._section.max_failure_share
        if failed and self._failures > share * max(FIRST, len(self._failed)):
            fix = "data" if self._section.function == CODE else "function"
            raise UserError(
                f"{self._title} failed on {self._failures} of the latest "
                f"{len(self._failed)} responses, the last time with {why.removeprefix('failed: ')}, for the response "
                f"{_short(response)} and the gold {_short(gold)}: fix the {fix}, or raise reward.max_failure_share "
                f"(now {share:g})"
            )


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return repr(short) if isinstance(value, str) else short
