"""Graceful shutdown: after SIGTERM, SIGHUP or Ctrl-C a run saves what it has and ends, within seconds in every phase.

A signal sets a flag that every loop and wait of a phase reads (`StopRequest.poll`). Where nothing has to be saved, it
ends the run at once (`StopRequest.at_once`). Torch is not imported here: the command line listens from its first line.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mugrpo_megatron.run.cursor import Cursor

HEEDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LOOK_EVERY_S = 1.0
"""How often a rank looks whether another one was asked."""
SECOND_S = 1.0
"""A second Ctrl-C counts from here on: torchrun passes on the one that the terminal has sent to all processes."""
INTERRUPTED = "\nmugrpo: Ctrl-C: saving. Again, it ends at once and loses the updates since the newest checkpoint\n"
TERMINATED = "\nmugrpo: {}: saving. It comes at a time limit, or from torchrun where another rank has failed\n"
AT_ONCE = "\nmugrpo: stopped as asked: what the run has on disk is as it was. The same command continues the run\n"


class Stopped(Exception):
    """The run stopped on request; says what is kept. The same command continues it."""

    def __init__(self, kept: str, code: int = 0) -> None:
        super().__init__(kept)
        self.code = code
        """Exit code of the command: 130 after Ctrl-C, so that a script does not go on, else 0."""


class AllStopped(Stopped):
    """Every rank has stopped at one place: `checkpoints.open_saver` saves the learner at `cursor` on the way out."""

    def __init__(self, also: str, code: int, cursor: Cursor) -> None:
        super().__init__(f"{also}the learner is saved at update {cursor.updates} of the run", code)
        self.cursor = cursor


def no_others(tell: bool) -> bool:
    """The other ranks of a world of one."""
    return False


@dataclass
class StopRequest:
    """Whether the run was asked to stop: this process, or any other rank as far as this one has heard."""

    requested: bool = False
    interrupted: bool = False
    """Whether it was by Ctrl-C."""
    others: Callable[[bool], bool] = no_others
    """(tell the other ranks) -> whether one of them was asked. Raises what has to end this rank."""
    _kept: str | None = None
    _announced: bool = False
    _next: float = 0.0

    def poll(self) -> bool:
        """Whether any rank was asked; cheap, any thread may call it often. Ranks hear at different times."""
        announce = self.requested and not self._announced
        if announce or time.monotonic() >= self._next:
            self._announced = self.requested
            self._next = time.monotonic() + LOOK_EVERY_S
            self.requested |= self.others(announce)
        return self.requested

    def request(self, interrupted: bool = False) -> None:
        """Ask this process; raises Stopped inside `at_once`."""
        self.requested = True
        self.interrupted |= interrupted
        if self._kept is not None:
            account, self._kept = self._kept, None
            raise self.stopped(account)

    def detach(self) -> None:
        """Neither tell the other ranks nor ask them from now on: this one closes its connections."""
        self.others = no_others

    def stopped(self, kept: str) -> Stopped:
        """What ends the run, with what it keeps."""
        return Stopped(kept, self._code)

    def all_stopped(self, cursor: Cursor, also: str = "") -> AllStopped:
        """What ends the run where all ranks agree to stop; `also` says what is kept or dropped, the learner aside."""
        return AllStopped(also, self._code, cursor)

    @property
    def _code(self) -> int:
        return 130 if self.interrupted else 0

    @contextmanager
    def at_once(self, kept: str) -> Iterator[None]:
        """Inside the block a signal raises Stopped wherever the main thread is: all that is worth it is on disk.

        A collective that fails because another rank has left in this way ends in Stopped too.
        """
        if self.requested:
            raise self.stopped(kept)
        self._kept = kept
        try:
            yield
        except RuntimeError as error:
            if self.requested:
                raise self.stopped(kept) from error
            raise
        finally:
            self._kept = None


class Terminated(BaseException):
    """SIGTERM in a command that has nothing to save: it leaves what Ctrl-C leaves."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated in the block, so that temporaries and worker processes go before the command does."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with _handled(end, signal.SIGTERM):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """The signals have this handler in the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def notice(number: int) -> str:
    """What a run says when it hears a signal."""
    return INTERRUPTED if number == signal.SIGINT else TERMINATED.format(signal.Signals(number).name)


@contextmanager
def stoppable(is_main: bool) -> Iterator[None]:
    """SIGTERM ends the process with exit code 0 where `handle_signals` does not hear it: before a run is open, and
    after it.

    All that the run has is on disk there, and by Python's own exit code a job that is pre-empted while it imports torch
    would count as failed. The main rank says so.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if is_main:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), AT_ONCE.encode())
        sys.exit(0)

    with _handled(end, signal.SIGTERM):
        yield


@contextmanager
def handle_signals(is_main: bool) -> Iterator[StopRequest]:
    """Turn SIGTERM (pre-emption, a time limit), SIGHUP (a lost terminal) and Ctrl-C into a request in the block.

    The main rank says so. A second Ctrl-C raises KeyboardInterrupt. A signal stays ignored where it is: Ctrl-C in a
    command that a script has put into the background, SIGHUP under nohup.
    """
    request = StopRequest()
    since: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if since and number == signal.SIGINT and now - since[0] > SECOND_S:
            raise KeyboardInterrupt
        if not since and is_main:
            with suppress(OSError):  # tee may have ended by the same Ctrl-C
                os.write(sys.stderr.fileno(), notice(number).encode())  # print may be in the middle of another line
        since.append(now)
        request.request(number == signal.SIGINT)

    with _handled(ask, *(number for number in HEEDED if signal.getsignal(number) is not signal.SIG_IGN)):
        yield request
