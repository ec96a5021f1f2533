"""CPU seconds of this process and everything that it has started: a cost that another program's load hardly changes."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def cpu_seconds(of_children: bool = True) -> float:
    """User and system seconds so far, of ended children too; not of a process that lost its parent before it ended.

    To look for running children takes milliseconds; without `of_children` they are left out.
    """
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for process in psutil.Process().children(recursive=True) if of_children else ():
        with suppress(psutil.Error):
            spent = process.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total
