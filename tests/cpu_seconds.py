"""CPU seconds of this process and everything that it has started: a cost that another program's load hardly changes."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

EVERY_S = 15.0


def cpu_seconds(root: psutil.Process | None = None, of_children: bool = True) -> float:
    """User and system seconds so far of a process, by default this one, and of its children, ended ones too.

    Not of a process that lost its parent before it ended. To look for running children takes milliseconds; without
    `of_children` they are left out.
    """
    root = root or psutil.Process()
    total = 0.0
    for process in (root, *(root.children(recursive=True) if of_children else ())):
        with suppress(psutil.Error):
            spent = process.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Slowness:
    """How slow the processor is while the suite runs, as a plugin: who shares it may make it several times slower."""

    seconds: list[float] = field(default_factory=list)
    """CPU seconds of one loop, every `EVERY_S`."""
    last: float = -math.inf

    def pytest_runtest_logfinish(self) -> None:
        """Time the loop between tests."""
        if time.monotonic() - self.last > EVERY_S:
            begin, total = time.process_time(), 0
            for number in range(1_000_000):
                total += number
            self.seconds.append(time.process_time() - begin)
            self.last = time.monotonic()

    @property
    def factor(self) -> float:
        """The loop's seconds over those on a processor of 3.5 GHz; at least 1."""
        return max(1.0, statistics.fmean(self.seconds) / 0.035) if self.seconds else 1.0
