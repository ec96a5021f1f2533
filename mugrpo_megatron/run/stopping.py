"""Stops a run on request: after SIGTERM, SIGHUP or Ctrl-C it saves what it has and ends, within seconds in every phase.

A signal sets a flag that every loop and wait of a phase reads (`StopRequest.poll`). While nothing has to be saved, it
ends the run at once (`StopRequest.at_once`). Torch is not imported here, because the command handles signals before
it imports anything slow.
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

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
POLL_INTERVAL_S = 1.0
"""Seconds after which a rank asks the store again whether another rank was asked to stop."""
REPEAT_AFTER_S = 1.0
"""A second Ctrl-C counts only if it comes so many seconds after the first: torchrun repeats the first one, which the
terminal has already sent to all processes."""
INTERRUPT_MESSAGE = (
    "\nmugrpo: Ctrl-C: saving. Again, it ends at once and loses the updates since the newest checkpoint\n"
)
TERMINATE_MESSAGE = (
    "\nmugrpo: {}: saving. It comes at a time limit, from a lost terminal, or from torchrun where another rank has "
    "failed\n"
)
STOPPED_MESSAGE = "\nmugrpo: stopped as asked: the run's files are intact. The same command continues the run\n"


class Stopped(Exception):
    """Raised when the run stops on request; the message says what is saved. The same command continues it."""

    def __init__(self, kept: str, code: int = 0) -> None:
        super().__init__(kept)
        self.code = code
        """Exit code of the command: 130 after Ctrl-C, so that a script that runs the command ends too, else 0."""


class AllStopped(Stopped):
    """Raised when every rank stops at the same cursor; `checkpoints.open_saver` then saves the learner there."""

    def __init__(self, also: str, code: int, cursor: Cursor) -> None:
        super().__init__(f"{also}the learner is saved at update {cursor.updates} of the run", code)
        self.cursor = cursor


def no_peers(announce: bool) -> bool:
    """Return False: the function `StopRequest.peers` of a run with a single process, which has no other ranks."""
    return False


@dataclass
class StopRequest:
    """Says whether this process, or any other rank that it knows of, was asked to stop."""

    requested: bool = False
    interrupted: bool = False
    """Whether the request to stop was a Ctrl-C."""
    peers: Callable[[bool], bool] = no_peers
    """(whether to announce this rank's request) -> whether any rank was asked to stop.

    Raises CollectiveFailure when a rank has failed.
    """
    _kept: str | None = None
    _announced: bool = False
    _next: float = 0.0

    def poll(self) -> bool:
        """Whether any rank was asked to stop; ranks learn of a request at different times. Any thread may call this, as
        often as it likes."""
        # Ranks learn of a request through the store and not by a collective: a signal finds ranks at different places,
        # and a collective would wait for a rank that is inside another collective.
        announce = self.requested and not self._announced
        if announce or time.monotonic() >= self._next:
            self._announced = self.requested
            self._next = time.monotonic() + POLL_INTERVAL_S
            self.requested |= self.peers(announce)
        return self.requested

    def request(self, interrupted: bool = False) -> None:
        """Ask this process to stop. Inside an `at_once` block it raises Stopped."""
        self.requested = True
        self.interrupted |= interrupted
        if self._kept is not None:
            kept, self._kept = self._kept, None
            raise self.stopped(kept)

    def detach(self) -> None:
        """Ask the other ranks no more, because this one is about to close its connections."""
        self.peers = no_peers

    def stopped(self, kept: str) -> Stopped:
        """The exception that ends the run; `kept` says what is saved."""
        return Stopped(kept, self.code)

    @property
    def code(self) -> int:
        """Exit code of a command that stops as asked."""
        return 130 if self.interrupted else 0

    @contextmanager
    def at_once(self, kept: str) -> Iterator[None]:
        """In the block, let a signal stop the run at once: Stopped is raised wherever the main thread is.

        `kept` is the exception's message, which says what is saved.
        """
        if self.requested:
            raise self.stopped(kept)
        self._kept = kept
        try:
            yield
        except RuntimeError as error:  # a collective fails when another rank has already ended
            if self.requested:
                raise self.stopped(kept) from error
            raise
        finally:
            self._kept = None


class Terminated(BaseException):
    """Raised on SIGTERM in a command that has nothing to save, so that it cleans up as after Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated on SIGTERM in the block, so that temporary files and worker processes are cleaned up."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with _handled(end, signal.SIGTERM):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle the signals `numbers` with `handler` in the block; afterwards their earlier handlers are restored."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def signal_message(number: int) -> str:
    """The message that a run prints when it receives the signal `number`."""
    return INTERRUPT_MESSAGE if number == signal.SIGINT else TERMINATE_MESSAGE.format(signal.Signals(number).name)


@contextmanager
def stoppable(is_main: bool) -> Iterator[None]:
    """In the block, end the process with exit code 0 on SIGTERM; the main rank prints a message.

    It is for the time before a run is open and after it is closed. An open run uses `handle_signals`.
    """
    # Outside of an open run nothing has to be saved. Without this handler the signal would kill the process, and a
    # scheduler that pre-empts a job during the import of torch would count the job as failed.

    def end(number: int, frame: FrameType | None) -> None:
        if is_main:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), STOPPED_MESSAGE.encode())
        sys.exit(0)

    with _handled(end, signal.SIGTERM):
        yield


@contextmanager
def handle_signals(is_main: bool) -> Iterator[StopRequest]:
    """In the block, let SIGTERM (pre-emption, a time limit), SIGHUP (a lost terminal) and Ctrl-C request a stop.

    The main rank prints a message for the first signal. A Ctrl-C more than REPEAT_AFTER_S later raises
    KeyboardInterrupt.
    """
    request = StopRequest()
    signal_times: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signal_times and number == signal.SIGINT and now - signal_times[0] > REPEAT_AFTER_S:
            raise KeyboardInterrupt
        if not signal_times and is_main:
            with suppress(OSError):  # the reader of the output, such as tee, may have ended by the same Ctrl-C
                os.write(
                    sys.stderr.fileno(), signal_message(number).encode()
                )  # os.write instead of print, because the signal may have interrupted a print
        signal_times.append(now)
        request.request(number == signal.SIGINT)

    # A signal that is ignored already stays ignored, such as Ctrl-C in a script's background job or SIGHUP under nohup.
    with _handled(on_signal, *(number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)):
        yield request
