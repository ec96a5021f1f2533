"""Whether a process that is over its limit of seconds computes or waits; the limit is meant for one that waits.

On a slow or busy machine a process that computes may need more seconds than its limit.
"""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

LOOK_S = 1.0
"""Seconds between two looks at a process whose time is over."""
STEPS_S = 0.05
"""A process that took at least so many CPU seconds between two looks computes; one that polls a service takes less."""
MOST_TIMES = 10
"""Multiple of its limit, in seconds of the clock, after which a process is late whatever it does."""


class Overtime:
    """What a process may take beyond its limit of seconds, if it computes and the machine is slow or busy.

    It is over once nothing below the process runs or is ready to run, once it has had its limit again in CPU seconds,
    or MOST_TIMES its limit by the clock.
    """

    def __init__(self, process: int, limit_s: float) -> None:
        """Begin now, where everything below `process` has had `limit_s` seconds by the clock."""
        self._process = process
        self._limit_s = limit_s
        self._last = time.monotonic() + (MOST_TIMES - 1) * limit_s
        self._cpu_at_start = self._cpu_at_look = cpu_seconds(process)

    def is_over(self) -> bool:
        """Whether the process is late. Ask again LOOK_S seconds after each answer, and after the beginning."""
        cpu, before = cpu_seconds(self._process), self._cpu_at_look
        self._cpu_at_look = cpu
        if cpu - self._cpu_at_start >= self._limit_s or time.monotonic() >= self._last:
            return True
        return cpu - before < STEPS_S and not is_ready(self._process)


def cpu_seconds(process: int) -> float:
    """CPU seconds of the descendants of a process, with those of children that they have waited for."""
    seconds = 0.0
    for child in _descendants(process):
        with suppress(psutil.Error):  # the process has ended meanwhile
            # Its own user and system time, and those of children that it has waited for.
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
