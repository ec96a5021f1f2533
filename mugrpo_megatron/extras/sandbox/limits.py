"""Writes the files of a jail."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


def write_files(root: str, files: Mapping[str, str]) -> None:
    """Write each file, `/`-separated path -> text, below `root`."""
    for name, text in files.items():
        path = Path(root + name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")


Mode = Literal["namespaces", "limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one execution."""

    mode: Mode = "namespaces"
    test_s: float = 4.0
    """Processor time of a test, in seconds; the kernel counts whole seconds, so it is rounded up."""
    memory_mb: int = 512
    """Address space, the interpreter's own 30 MiB included."""
    output_bytes: int = 1 << 20
    """More than this on stdout, stderr or as an answer ends the program."""
    scratch_mb: int = 16
    """Files in its /tmp, all together; with mode `limits` it writes none."""
    threads: int = 32
    """Threads of a program; with mode `limits` `memory_mb` alone bounds them, at about 500 of the smallest."""
    wall_s: float = 9.0
    """Seconds after which a program is killed whatever it does: it sleeps, or the machine is busy."""


def hold(limits: Limits, alone: bool) -> None:
    """Set this process's resource limits, for itself and all that it executes; they cannot be raised again.

    alone: whether no other process is of its user, so that its threads can be limited; elsewhere those would count.
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
