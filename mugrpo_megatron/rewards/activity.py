"""Tells whether a process that has exceeded its limit of seconds computes or waits; the limit is meant for waiting.

On a slow or busy machine a process that computes may need more seconds than its limit.
"""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

LOOK_S = 1.0
"""Seconds between two looks at a process that has exceeded its limit."""
STEPS_S = 0.05
"""Fewest CPU seconds between two looks with which a process counts as computing. A process that waits for a service and
polls it takes fewer."""
MOST_TIMES = 10
"""A process is late after this many times its limit by the clock, whatever it does."""


class Overtime:
    """The time after its limit that a process may still have, because it computes and the machine is slow or busy.

    Only the descendants of `process` are watched. The overtime ends at a look if none of them is ready to run and they
    have not computed since the last look. It also ends when they have used the limit again in CPU seconds, and when
    MOST_TIMES times the limit has passed by the clock.
    """

    def __init__(self, process: int, limit_s: float) -> None:
        """Begin the overtime of `process`, whose descendants have just had `limit_s` seconds by the clock."""
        self._process = process
        self._limit_s = limit_s
        self._last = time.monotonic() + (MOST_TIMES - 1) * limit_s
        self._cpu_at_start = self._cpu_at_look = cpu_seconds(process)

    def is_over(self) -> bool:
        """Whether the overtime has ended, so that the process is late. Call it every LOOK_S seconds."""
        cpu, before = cpu_seconds(self._process), self._cpu_at_look
        self._cpu_at_look = cpu
        if cpu - self._cpu_at_start >= self._limit_s or time.monotonic() >= self._last:
            return True
        return cpu - before < STEPS_S and not is_ready(self._process)


def cpu_seconds(process: int) -> float:
    """CPU seconds of a process's descendants, including those of ended children for which a descendant has waited."""
    seconds = 0.0
    for child in _descendants(process):
        # The first four numbers are user and system time of the process, and of the children that it has waited for.
        with suppress(psutil.Error):  # the process has ended meanwhile
            seconds += sum(child.cpu_times()[:4])
    return seconds


def is_ready(process: int) -> bool:
    """Whether a descendant of a process runs, waits for a processor, or waits for a disk."""
    for child in _descendants(process):
        with suppress(psutil.Error):
            if child.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                return True
    return False


def _descendants(process: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(process).children(recursive=True)
    return []
