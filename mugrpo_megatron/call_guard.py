"""Guards of a user's code inside this process: its time has an end, and it cannot end the process unnoticed.

Rewards, judges' parsers and episodes have workers instead. A loss needs the learner's tensors, so it runs here.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, cast

TEMPLATE_S = 10.0
"""CPU seconds in which a template has to render, and a parser to read a text."""
AGAIN_S = 0.25
"""The alarm repeats: the first may ring where an exception is swallowed, as in a finalizer."""
DEAF_S = 30.0
"""Seconds after its alarm in which a call may still raise; then it hangs inside C code, and the process ends."""


class TookTooLong(BaseException):
    """The time of a call is over. Not an Exception, so that no `except Exception` swallows it."""


@contextmanager
def clock(seconds: float, cpu: bool = False) -> Iterator[None]:
    """Raise TookTooLong in the block once it has taken `seconds`; without effect outside the main thread.

    With `cpu` only this thread's CPU time counts: what cannot wait ends nothing on a busy machine.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    inside, begin = True, time.thread_time()

    def ring(_number: int, _frame: FrameType | None) -> None:
        if not inside:  # it rang while the block ended
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif not cpu or time.thread_time() - begin >= seconds:
            raise TookTooLong(f"it took longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def end_of_process(seconds: float) -> Iterator[None]:
    """End the process with code 1, after its tracebacks, if the block takes `seconds` where Python reads no signals."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def without_exits() -> Iterator[None]:
    """`os._exit` raises SystemExit in the block, on every thread; a fork's ends the fork."""
    leave = refuse_exits()
    try:
        yield
    finally:
        setattr(os, "_exit", leave)  # noqa: B010


def refuse_exits() -> Callable[[int], NoReturn]:
    """Have `os._exit` raise SystemExit in this process from now on; returns the function that exits."""
    leave, process = cast(Callable[[int], NoReturn], os._exit), os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # `multiprocessing` ends its forks so
            leave(status)
        raise SystemExit(f"os._exit({status})")

    setattr(os, "_exit", refuse)  # noqa: B010  # mypy holds `os._exit` for a constant
    return leave
