"""The limits of one execution of a program, and the function that sets them in its process."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass
from typing import Literal

Mode = Literal["namespaces", "limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    mode: Mode = "namespaces"
    test_s: float = 4.0
    """Processor time of a test, in seconds; the kernel counts whole seconds, so it is rounded up."""
    memory_mb: int = 512
    """Address space, the interpreter's own 30 MiB included."""
    output_bytes: int = 1 << 20
    """Most bytes on stdout, on stderr and as an answer; a program that writes more is ended."""
    scratch_mb: int = 16
    """Most MiB of all files in the program's /tmp together; with mode `limits` a program cannot write files."""
    threads: int = 32
    """Most threads of a program. If its user may have other processes, as always with mode `limits`, only `memory_mb`
    bounds them: about 500 with the smallest stacks fit."""
    wall_s: float = 9.0
    """Seconds by the clock after which a program that sleeps is killed. One that computes has `test_s`, however slow or
    busy the machine is."""


def set_limits(limits: Limits, alone: bool) -> None:
    """Set this process's resource limits, for itself and all that it executes; they cannot be raised again.

    alone: whether the process's user has no other process. If it has, RLIMIT_NPROC stays unset, since it counts all
    threads of a user.
    """
    processor = max(1, math.ceil(limits.test_s))
    scratch = limits.scratch_mb << 20 if limits.mode == "namespaces" else 0
    wanted = [
        (resource.RLIMIT_AS, limits.memory_mb << 20),
        (resource.RLIMIT_CPU, processor),
        (resource.RLIMIT_FSIZE, scratch),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_STACK, 64 << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ]
    if alone:
        wanted.append((resource.RLIMIT_NPROC, limits.threads))
    for name, value in wanted:
        hardest = resource.getrlimit(name)[1]
        value = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
        resource.setrlimit(name, (value, value))
