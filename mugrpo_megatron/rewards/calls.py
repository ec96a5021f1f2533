"""Calls of a reward function as the dispatcher holds them, and the processes that make them, a batch at a time."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from mugrpo_megatron.errors import RewardFailure
from mugrpo_megatron.recipe.scoring import CODE, RewardSection
from mugrpo_megatron.rewards.guard import END
from mugrpo_megatron.rewards.items import Needs, ScoringInput, Verdict

BATCH = 16
"""Responses sent to a worker at once, unless one call is over more: enough to hide the round trip, few enough to lose
little time at the end."""
MEMORY_SHARE = 64
"""Several calls in a batch have at most the memory of a worker divided by this, as JSON: text, its copy and the values
in it then leave the most for the function, though a list of small numbers takes twenty times its text."""


class VerdictSink(Protocol):
    """Where verdicts go."""

    def put(self, place: int, verdict: Verdict) -> None:
        """Called once for every place."""

    def fail(self, error: Exception) -> None:
        """Called when the missing verdicts will never come."""


@dataclass(slots=True)
class Call:
    """One call of the function, over one or more responses."""

    items: Sequence[ScoringInput]
    waiting: list[tuple[VerdictSink, int]]
    """Where the verdict on each item goes; of a single item, it goes to all of them."""
    deaths: int = 0
    """Workers that died on it, or on the batch that it was the first of."""

    def answer(self, verdicts: Sequence[Verdict]) -> None:
        """Hand over the verdicts."""
        for number, (taker, place) in enumerate(self.waiting):
            taker.put(place, verdicts[number if len(verdicts) > 1 else 0])

    def fail(self, error: Exception) -> None:
        """Hand over an error."""
        for taker, _ in self.waiting:
            taker.fail(error)


ALARM_SHARE = 0.125
"""Processor time, as a share of the wall-clock limit, after which a worker gives up the comparison and goes on."""
DEATH_SECONDS = 10.0
"""Killed processes are waited for this long; one that hangs in the kernel must not hang the run."""
_COMMAND = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import mugrpo_megatron; del sys.path[0]; "
    "from mugrpo_megatron.rewards.guard import main; main(sys.argv.pop(1))"
)
"""Finds this package where the parent has found it, and everything else without the current directory (`-P`)."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker and the guard around it; killed and reaped, with all that it has started, in one call."""

    process: subprocess.Popen[bytes]
    """The guard; it ends when the worker does, with the worker's exit code."""
    connection: Connection

    def send(self, message: bytes) -> None:
        """Raises OSError when the worker is dead, or stopped and not reading."""
        self.connection.send_bytes(message)

    def receive(self) -> Any:
        """One message. Raises EOFError or OSError when the worker is dead, or stopped in the middle of a message."""
        return json.loads(self.connection.recv_bytes())

    def end(self) -> None:
        """Ask the guard to kill the worker and all that it has started, and return at once."""
        self.process.send_signal(END)

    def kill(self) -> None:
        """`end`, and wait until they are gone, at most DEATH_SECONDS."""
        self.end()
        try:
            self.process.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:  # the guard waits for a process that hangs in the kernel, or is stopped
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()

    def ending(self) -> str:
        """How a worker that has closed its connection ended: `exit code 3`, `SIGKILL`."""
        try:
            code = self.process.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            return "without exiting"
        return signal.Signals(code - 128).name if code > 128 else f"exit code {code}"


def start_worker(section: RewardSection, key: str) -> WorkerProcess:
    """Start a worker of `section.function`, which the recipe has at `key`, and its guard."""
    options = {
        "key": key,
        "function": section.function,
        "policy": section.policy,
        "memory_mb": section.worker_memory_mb,
        "timeout_s": section.timeout_s,
        "alarm_s": section.timeout_s * ALARM_SHARE,
        "code": section.code.model_dump() | {"memory_mb": section.worker_memory_mb // 2},
    }
    return start_guarded("mugrpo_megatron.rewards.worker", options, section.timeout_s)


def start_guarded(
    worker: str, options: Mapping[str, Any], timeout_s: float, environment: Mapping[str, str] = MappingProxyType({})
) -> WorkerProcess:
    """Start the module `worker`, whose `serve` gets a socket and the options as JSON, and its guard.

    No fork of a process with threads, no second import of its main module. A message that it does not read for
    `timeout_s`, or writes for so long, raises OSError.
    """
    ours, theirs = socket.socketpair()
    limit = struct.pack("ll", int(timeout_s) + 1, 0)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    command = [sys.executable, "-P", "-c", _COMMAND, str(Path(__file__).parents[2]), worker]
    with theirs:
        process = subprocess.Popen(
            [*command, str(os.getpid()), str(theirs.fileno()), json.dumps(options)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    return WorkerProcess(process, Connection(ours.detach()))


@dataclass(slots=True)
class Worker:
    """A worker process and its calls."""

    process: WorkerProcess
    deadline: float
    """When it is killed, by the monotonic clock."""
    ready: bool = False
    answered: int = 0
    """Calls."""
    batch: deque[Call] = field(default_factory=deque)
    reading: bool = False
    """Whether it has yet to say that it has read its batch; until then no call can have ended it."""
    alone: bool = False
    """Whether its batch was of one call."""
    sent: int = 0
    """Bytes of its batch."""

    @property
    def busy(self) -> bool:
        return bool(self.batch) or not self.ready

    def message(self, needs: Needs, most: int) -> tuple[bytes, list[Call]]:
        """Its batch as `message` writes it, cut to what fits, and the calls that were cut off."""
        count, text = message(self.batch, needs, most)
        rest = [self.batch.pop() for _ in range(len(self.batch) - count)]
        self.reading, self.alone, self.sent = True, count == 1, len(text)
        return text, rest[::-1]

    def blamed(self) -> Call | None:
        """The call that is given up because the worker died, taken out of its batch; None where there is none.

        The first call of the batch is tried once more, alone, unless it was made alone in a fresh worker: earlier calls
        or the others of the batch may be the cause. One that was not read is tried again in any case: something else
        may have killed or stopped the worker.
        """
        if not self.batch:
            return None
        self.batch[0].deaths += 1
        surely = self.alone and self.answered == 0 and not self.reading
        return self.batch.popleft() if surely or self.batch[0].deaths > 1 else None


def calls_of(taker: VerdictSink, places: Sequence[int], items: Sequence[ScoringInput], most: int) -> Iterator[Call]:
    """Calls over at most `most` consecutive items."""
    for start in range(0, len(items), most):
        part = slice(start, start + most)
        yield Call(items[part], [(taker, place) for place in places[part]])


def next_batch(queue: deque[Call]) -> list[Call]:
    """Take the calls that a worker may get next from the front of the queue; one that a worker died on comes alone."""
    batch: list[Call] = []
    size = 0
    while queue and (not batch or size + len(queue[0].items) <= BATCH):
        if batch and (queue[0].deaths or batch[0].deaths):
            break
        size += len(queue[0].items)
        batch.append(queue.popleft())
    return batch


def most_bytes(memory_mb: int) -> int:
    """Of a batch of several calls, for a worker of so much memory."""
    return (memory_mb << 20) // MEMORY_SHARE


def message(calls: Sequence[Call], needs: Needs, most: int) -> tuple[int, bytes]:
    """How many of the calls go to a worker together, and they as JSON: the first, and those that fit `most` bytes.

    What the function does not need stays here, what items share is sent once.
    """
    subjects: list[str] = []
    numbers: dict[tuple[int, int, int, str], int] = {}

    def subject(item: ScoringInput) -> int:
        key = (id(item.gold), id(item.row), id(item.prompt), item.source)
        if key not in numbers:
            numbers[key] = len(subjects)
            whole = [item.gold, item.row if needs.row else {}, item.prompt if needs.prompt else "", item.source]
            subjects.append(json.dumps(whole))
        return numbers[key]

    def sent(call: Call) -> str:
        parts = [[item.response, subject(item), list(item.ids) if needs.ids else []] for item in call.items]
        return json.dumps(parts)

    taken: list[str] = []
    size = 0
    for call in calls:
        before = len(subjects)
        text = sent(call)
        size += len(text) + sum(map(len, subjects[before:]))  # JSON is ASCII here: a character is a byte
        if taken and size > most:
            del subjects[before:]
            break
        taken.append(text)
    return len(taken), f'{{"calls": [{", ".join(taken)}], "subjects": [{", ".join(subjects)}]}}'.encode()


FIRST = 16
WINDOW = 10_000
_SHOWN = 60
"""Characters of a response and a gold in the message."""


class FailureCount:
    """The failures among the latest WINDOW responses."""

    def __init__(self, section: RewardSection, key: str = "reward.function") -> None:
        """`key` is the recipe's that names the function."""
        self._section, self._key = section, key
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._failures = 0

    def add(self, failed: bool, why: str, response: str, gold: object) -> None:
        """Count one response; RewardFailure when the failures exceed `reward.max_failure_share`.

        Their share is of at least FIRST responses: with the default of 1 %, any failure in the first 99 responses
        ends the run.
        """
        if len(self._failed) == WINDOW:
            self._failures -= self._failed[0]
        self._failed.append(failed)
        self._failures += failed
        share = self._section.max_failure_share
        if failed and self._failures > share * max(FIRST, len(self._failed)):
            fix = "data" if self._section.function == CODE else "function"
            raise RewardFailure(
                f"{self._key} {self._section.function!r} failed on {self._failures} of the latest "
                f"{len(self._failed)} responses, the last time with {why.removeprefix('failed: ')}, for the response "
                f"{_short(response)} and the gold {_short(gold)}: fix the {fix}, or raise reward.max_failure_share "
                f"(now {share:g})",
                self._key,
            )


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return repr(short) if isinstance(value, str) else short
