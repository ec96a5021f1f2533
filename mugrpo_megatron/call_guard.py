"""Limits for foreign code that runs inside this process: its time, its memory, and whether it may end the process.

A user's functions of the loss run here, because they need the learner's tensors. So do chat templates and parsers of
tool calls. Rewards, judges' parsers and episodes run in workers instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

TEMPLATE_S = 10.0
"""CPU seconds that a template may take to render, and a parser to read a text."""
TEMPLATE_BYTES = 2 << 30
"""Bytes of address space that a template or a parser may take on top of what the process has."""
ENDS = ("_exit", "execv", "execve")
"""Functions of `os` that end a program; the other `exec*` functions call these."""
AGAIN_S = 0.25
"""Seconds between the alarms. The alarm repeats, because the first may come where an exception is swallowed, as in a
finalizer."""
DEAF_S = 30.0
"""Seconds that a call has to end after its alarm. A call that goes on hangs in C code, and the process is ended."""


class TookTooLong(BaseException):
    """Raised when the time of a call is over. It is no Exception, so that no `except Exception` swallows it."""


@contextmanager
def clock(seconds: float, cpu: bool = False, memory: int | None = None) -> Iterator[None]:
    """Raise TookTooLong in the block once it has taken `seconds`. Outside the main thread the block has no limits.

    With `cpu` only this thread's CPU time counts, so that code that never waits is not ended because the machine is
    busy. With `memory` the block may take so many bytes of address space more; beyond that it gets a MemoryError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    inside, begin = True, time.thread_time()
    leaving = (inspect.unwrap(clock).__code__, contextlib._GeneratorContextManager.__exit__.__code__)

    def ring(_number: int, frame: FrameType | None) -> None:
        if not inside:  # the alarm came while the block was ending
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif frame and frame.f_code in leaving:  # an exception raised here would skip the lines that lift the limits
            return
        elif not cpu or time.thread_time() - begin >= seconds:
            raise TookTooLong(f"it took longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    if memory is not None:
        space = resource.getrlimit(resource.RLIMIT_AS)
        most = [limit for limit in (address_space() + memory, space[0]) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(most), space[1]))
    try:
        yield
    finally:
        inside = False
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, space)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def template_clock(seconds: float | None = None) -> AbstractContextManager[None]:
    """Limit the CPU seconds (by default `TEMPLATE_S`) and the memory of a block that renders a template or parses text.

    Raises TookTooLong or MemoryError in the block; has no effect outside the main thread.
    """
    return clock(TEMPLATE_S if seconds is None else seconds, cpu=True, memory=TEMPLATE_BYTES)


def address_space() -> int:
    """The bytes of this process's address space, as RLIMIT_AS counts them."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


@contextmanager
def end_of_process(seconds: float) -> Iterator[None]:
    """Print all threads' tracebacks and end the process with code 1 if the block takes longer than `seconds`.

    This also ends a call that hangs in C code, where Python handles no signals.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def without_exits() -> Iterator[None]:
    """In the block, let `os._exit` and `os.exec*` raise SystemExit in every thread of this process.

    In a process that the block forks, they work as always.
    """
    ends = refuse_exits()
    try:
        yield
    finally:
        for name, function in ends.items():
            setattr(os, name, function)


def refuse_exits() -> dict[str, Callable[..., Any]]:
    """Make the functions `ENDS` of `os` raise SystemExit in this process; returns the original functions by name."""
    ends, process = {name: getattr(os, name) for name in ENDS}, os.getpid()

    def refusal(name: str) -> Callable[..., Any]:
        def refuse(*arguments: Any, **named: Any) -> Any:
            if os.getpid() != process:  # a forked process, which `multiprocessing` ends by os._exit
                return ends[name](*arguments, **named)
            raise SystemExit(f"os.{name}({', '.join(map(repr, (*arguments[:2], *named.values())))})")

        return refuse

    for name in ENDS:
        setattr(os, name, refusal(name))
    return ends
