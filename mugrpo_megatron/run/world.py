"""What the ranks of a run do together outside the learner: barriers, reductions, gathers, shared counters."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from mugrpo_megatron.errors import CollectiveFailure
from mugrpo_megatron.learner.groups import Ranks, named_phase
from mugrpo_megatron.learner.heartbeat import named
from mugrpo_megatron.run.cursor import Cursor

HEEDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LOOK_EVERY_S = 1.0
"""How often a rank looks whether another one was asked."""
SECOND_S = 1.0
"""A second Ctrl-C counts from here on: torchrun passes on the one that the terminal has sent to all processes."""
NOTICE = (
    "\nmugrpo: asked to stop; saving. Ctrl-C again ends at once and loses the updates since the newest checkpoint\n"
)

AT_ONCE = "\nmugrpo: stopped as asked: what the run has on disk is as it was. The same command continues the run\n"


class Stopped(Exception):
    """The run stopped on request; says what is kept. The same command continues it."""

    def __init__(self, kept: str, code: int = 0) -> None:
        super().__init__(kept)
        self.code = code
        """Exit code of the command: 130 after Ctrl-C, so that a script does not go on, else 0."""


class AllStopped(Stopped):
    """Every rank has stopped at one place: `checkpoints.open_saver` saves the learner at `cursor` on the way out."""

    def __init__(self, kept: str, code: int, cursor: Cursor) -> None:
        super().__init__(f"{kept}the learner is saved at update {cursor.updates} of the run", code)
        self.cursor = cursor


def no_others(tell: bool) -> bool:
    """The other ranks of a world of one."""
    return False


@dataclass
class StopRequest:
    """Whether the run was asked to stop: this process, or any other rank as far as this one has heard."""

    asked: bool = False
    interrupted: bool = False
    """Whether it was by Ctrl-C."""
    others: Callable[[bool], bool] = no_others
    """(tell the other ranks) -> whether one of them was asked. Raises what has to end this rank."""
    _kept: str | None = None
    _told: bool = False
    _next: float = 0.0

    def heard(self) -> bool:
        """Whether any rank was asked; cheap, any thread may call it often. Each rank hears at a time of its own."""
        tells = self.asked and not self._told
        if tells or time.monotonic() >= self._next:
            self._told = self.asked
            self._next = time.monotonic() + LOOK_EVERY_S
            self.asked |= self.others(tells)
        return self.asked

    def ask(self, interrupted: bool = False) -> None:
        """Ask this process; raises Stopped inside `at_once`."""
        self.asked = True
        self.interrupted |= interrupted
        if self._kept is not None:
            kept, self._kept = self._kept, None
            raise self.stopped(kept)

    def leave(self) -> None:
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
        if self.asked:
            raise self.stopped(kept)
        self._kept = kept
        try:
            yield
        except RuntimeError as error:
            if self.asked:
                raise self.stopped(kept) from error
            raise
        finally:
            self._kept = None


@contextmanager
def stoppable(is_main: bool) -> Iterator[None]:
    """SIGTERM ends the process with exit code 0 where `listening` does not hear it: before a run is open, and after it.

    All that the run has is on disk there, and by Python's own exit code a job that is pre-empted while it imports torch
    would count as failed. The main rank says so.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if is_main:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), AT_ONCE.encode())
        sys.exit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def listening(is_main: bool) -> Iterator[StopRequest]:
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
                os.write(sys.stderr.fileno(), NOTICE.encode())  # print may be in the middle of another line
        since.append(now)
        request.ask(number == signal.SIGINT)

    heeded = [number for number in HEEDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in heeded}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


T = TypeVar("T")
STOP_PATIENCE_S = 18.0
"""A rank that was asked to stop gives up a dead one after this time: torchrun kills it 30 s after the other's death."""
MISSED_BEAT_S = 9.0
"""A rank has missed a heartbeat: they come every 10 s at most."""
STOP, FAILED = "run/stop", "run/failed"
"""Keys of the rendezvous store: how many ranks were asked to stop, and how a failing rank ended."""


@dataclass(frozen=True)
class World:
    """All ranks of a run; every method is collective unless it says otherwise. A world of one communicates nothing."""

    ranks: Ranks
    group: dist.ProcessGroup | None
    """All ranks over gloo, also where the learner's collectives run over NCCL; None in a world of one."""
    engines: int
    """Engines of all ranks together; 0 in a run that does not generate."""
    stop: StopRequest = field(default_factory=StopRequest)

    def barrier(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank is here, as long as all of them are alive; `meanwhile` is called repeatedly.

        Raises CollectiveFailure once another rank has failed. A rank that was asked to stop is less patient with a rank
        whose heartbeat is missing.
        """
        heartbeat = self.ranks.heartbeat
        if heartbeat is None:
            return

        heard_at: list[float] = []

        def look() -> None:
            meanwhile()
            if not self.stop.heard():
                return
            heard_at.extend([] if heard_at else [time.monotonic()])
            waited_s = time.monotonic() - heard_at[0]
            if waited_s > STOP_PATIENCE_S and (silent := heartbeat.silent(MISSED_BEAT_S)):
                raise _failure(self.ranks, f"the run stops, and there is no heartbeat from {named(silent)}")

        heartbeat.barrier(look)

    def any_rank(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank: the same answers everywhere."""
        answers = torch.tensor(flags, dtype=torch.int32)
        if self.group:
            with named_phase(self.ranks):
                dist.all_reduce(answers, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in answers]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        values = [value] * self.ranks.world
        if self.group:
            with named_phase(self.ranks):
                dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        values = [value]
        if self.group:
            with named_phase(self.ranks):
                dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def count(self, counter: str, amount: int) -> int:
        """Add to a counter that all ranks share and return its new value. Not collective."""
        assert self.ranks.heartbeat
        return self.ranks.heartbeat.ask(lambda store: store.add(counter, amount))

    def tell(self, name: str, text: str) -> None:
        """Leave a text for the other ranks. Not collective; any thread may call it."""
        assert self.ranks.heartbeat
        self.ranks.heartbeat.ask(lambda store: store.set(name, text))

    def told(self, name: str) -> str:
        """The text that a rank has left, empty if none has. Not collective; any thread may call it."""
        assert self.ranks.heartbeat
        return self.ranks.heartbeat.ask(lambda store: store.get(name).decode() if store.check([name]) else "")


def open_world(ranks: Ranks, timeout_s: float, engines: int, stop: StopRequest) -> World:
    """The world of the ranks that the learner's process groups already connect; `stop` hears of requests to others."""
    if ranks.world == 1:
        return World(ranks, None, engines, stop)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    stop.others = lambda tell: _others_asked(ranks, tell)
    return World(ranks, group, engines, stop)


@contextmanager
def telling_failures(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks of an exception that ends this one, so that none of them waits for it."""
    try:
        yield
    except (Stopped, CollectiveFailure):  # others stop or fail too
        raise
    except Exception as error:
        text = f"rank {ranks.rank} failed: {(str(error) or type(error).__name__).splitlines()[0]}"
        if ranks.heartbeat:
            with suppress(CollectiveFailure):
                ranks.heartbeat.ask(lambda store: store.set(FAILED, text))
        raise


def _others_asked(ranks: Ranks, tell: bool) -> bool:
    """Whether a rank was asked to stop, this one with `tell`; CollectiveFailure when one has failed."""

    def look(store: dist.Store) -> tuple[int, str]:
        return store.add(STOP, int(tell)), store.get(FAILED).decode() if store.check([FAILED]) else ""

    assert ranks.heartbeat
    asked, failed = ranks.heartbeat.ask(look)
    if failed:
        raise _failure(ranks, failed)
    return asked > 0


def _failure(ranks: Ranks, cause: str) -> CollectiveFailure:
    assert ranks.heartbeat
    return CollectiveFailure(f"rank {ranks.rank} of {ranks.world} ends in {ranks.heartbeat.doing}: {cause}")
