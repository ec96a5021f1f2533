"""What a host process does at its start: it imports SGLang, takes over the engine's log, stays where it joins one."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from mugrpo_megatron.engine.channel import Channel
from mugrpo_megatron.engine.cpu_build import Build


def engine_type(device: str, compiled: bool) -> Callable[..., Any]:
    """What makes SGLang's engine of its arguments; on CPU, `cpu.CpuEngine`, `compiled` with functions in C."""
    # Imported here, so that the guard runs before the slow imports.
    if device == "cpu":
        build = Build() if compiled else None
        from mugrpo_megatron.engine.cpu import CpuEngine

        return partial(CpuEngine, build.wait() if build else None)
    from sglang.srt.entrypoints.engine import Engine

    return Engine  # type: ignore[no-any-return]


def log_to(log: Path) -> None:
    """Append this process's output to `log`, first what has gone to the file that it was started with."""
    with log.open("ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        file.write(os.pread(1, os.fstat(1).st_size, 0))
        os.ftruncate(1, 0)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def stay(connection: Channel) -> None:
    """Where the engine's leader is on another node: wait until one of SGLang's processes here ends, or the client.

    They answer to the leader's over SGLang's process group. SGLang watches them on the leader's node alone.
    """
    schedulers = multiprocessing.active_children()
    connection.send(("ready", None))
    ended = wait([connection.fileno(), *(scheduler.sentinel for scheduler in schedulers)])
    for scheduler in schedulers:
        if scheduler.sentinel in ended:
            scheduler.join()
            raise RuntimeError(f"SGLang's process {scheduler.pid} ended with exit code {scheduler.exitcode}")
