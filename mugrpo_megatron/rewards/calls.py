"""Calls of a reward function: how they are put into batches, and the worker processes that execute them."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from mugrpo_megatron.errors import RewardFailure
from mugrpo_megatron.recipe.scoring import CODE, RewardSection
from mugrpo_megatron.rewards.activity import LOOK_S, Overtime
from mugrpo_megatron.rewards.guard import END
from mugrpo_megatron.rewards.items import Needs, ScoringInput, Verdict

BATCH = 16
"""Most responses in a batch, unless a single call has more: enough to hide the round trip, and few enough that no
worker is idle for long at the end."""
MEMORY_SHARE = 64
"""A batch of several calls has, as JSON, at most a worker's memory divided by this. Most memory is left to the
function, even if parsed values take twenty times their text."""


class VerdictSink(Protocol):
    """Receives the verdicts on the responses of one `submit`."""

    def put(self, index: int, verdict: Verdict) -> None:
        """Take the verdict on the response with this index; called once for every index."""

    def fail(self, error: Exception) -> None:
        """Take the error that ended the verifier; no more verdicts follow."""


@dataclass(slots=True)
class Call:
    """One call of the function, over one or more responses."""

    items: Sequence[ScoringInput]
    sinks: list[tuple[VerdictSink, int]]
    """(sink, index) for the verdict on each item. If the call has a single item, all sinks get its verdict."""
    crashes: int = 0
    """Number of workers that died during this call, or before they had read a batch that began with it."""

    def finish(self, verdicts: Sequence[Verdict]) -> None:
        for number, (sink, index) in enumerate(self.sinks):
            sink.put(index, verdicts[number if len(verdicts) > 1 else 0])

    def fail(self, error: Exception) -> None:
        for sink, _ in self.sinks:
            sink.fail(error)


ALARM_SHARE = 0.125
"""Fraction of a call's limit after which, in CPU seconds, an alarm ends the call. The worker then goes on with the next
call."""
DEATH_SECONDS = 10.0
"""Most seconds to wait for killed processes: one that hangs in the kernel must not hang the run."""
_COMMAND = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import mugrpo_megatron; del sys.path[0]; "
    "from mugrpo_megatron.rewards.guard import main; main(sys.argv.pop(1))"
)
"""Program of a worker's new interpreter. It imports this package from where the parent has it. `-P` keeps it
from importing anything else from the current directory."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker process, started by a guard process, and the connection to it."""

    process: subprocess.Popen[bytes]
    """The guard's process. It ends with the worker, and with the worker's exit code."""
    connection: Connection

    def send(self, message: bytes) -> None:
        """Send a message; OSError if the worker is dead, or is stopped and does not read."""
        self.connection.send_bytes(message)

    def receive(self) -> Any:
        """Receive a message; EOFError or OSError if the worker is dead, or was stopped in the middle of a message."""
        return json.loads(self.connection.recv_bytes())

    def end(self) -> None:
        """Ask the guard to kill the worker and all its descendants; does not wait for that."""
        self.process.send_signal(END)

    def kill(self) -> None:
        """Make the guard kill the worker and its descendants, and wait for that; after DEATH_SECONDS kill the guard's
        process group."""
        self.end()
        try:
            self.process.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:  # a process hangs in the kernel, or the guard itself is stopped
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()

    def exit_status(self) -> str:
        """The exit status of a worker that has closed its connection, as text: `exit code 3`, `SIGKILL`, or `without
        exiting` if it still runs after DEATH_SECONDS."""
        try:
            code = self.process.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            return "without exiting"
        return signal.Signals(code - 128).name if code > 128 else f"exit code {code}"


def start_worker(section: RewardSection, key: str, of_judge: bool) -> WorkerProcess:
    """Start a guard and its worker for `section.function`, which the recipe has at `key`.

    `of_judge` says that the function is a judge's `parse`, which reads the score in the judge's answer.
    """
    options = {
        "of_judge": of_judge,
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
    """Start a guard whose worker runs `serve(socket, options as JSON)` of the module `worker`.

    Sending or receiving a message raises OSError if it takes longer than `timeout_s`.
    """
    # The worker is a new interpreter. Forking a process with threads may copy a lock that is held, and spawning with
    # `multiprocessing` would import the main module again.
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
    process: WorkerProcess
    deadline: float
    """Monotonic time after which the worker may be late; in its `overtime`, the time of the next look at it."""
    overtime: Overtime | None = None
    """The overtime of the worker's call; None until the deadline has passed."""
    ready: bool = False
    finished_calls: int = 0
    batch: deque[Call] = field(default_factory=deque)
    reading: bool = False
    """Whether the worker has not yet confirmed that it has read its batch. Until then no call can have caused its
    death."""
    single_call: bool = False
    """Whether the worker's batch had only one call."""
    batch_bytes: int = 0

    @property
    def busy(self) -> bool:
        return bool(self.batch) or not self.ready

    def limit(self, seconds: float) -> None:
        """Set the time limit of the worker's next step: its start, the reading of a batch, or a call."""
        self.deadline, self.overtime = time.monotonic() + seconds, None

    def is_late(self, limit_s: float) -> bool:
        """Whether the worker's call, which has had its `limit_s` seconds, is to be given up; if not, sets the time of
        the next look as `deadline`."""
        if self.overtime is None:
            self.overtime = Overtime(self.process.process.pid, limit_s)
        elif self.overtime.is_over():
            return True
        self.deadline = time.monotonic() + LOOK_S
        return False

    def message(self, needs: Needs, max_bytes: int) -> tuple[bytes, list[Call]]:
        """Make the message for the worker's batch (`batch_message`). Returns the message, and the calls that do not fit
        into it, which are removed from the batch."""
        count, text = batch_message(self.batch, needs, max_bytes)
        unsent = [self.batch.pop() for _ in range(len(self.batch) - count)]
        self.reading, self.single_call, self.batch_bytes = True, count == 1, len(text)
        return text, unsent[::-1]

    def crashed_call(self) -> Call | None:
        """Count the worker's death for its current call. Returns the call, removed from the batch, if it is given up;
        None if it is retried or if there is none."""
        if not self.batch:
            return None
        self.batch[0].crashes += 1
        # A call is given up at once only if nothing else can be the cause: it was the only call of a fresh worker, and
        # the worker had read it. Otherwise it is retried once, in a batch of its own.
        certain = self.single_call and self.finished_calls == 0 and not self.reading
        return self.batch.popleft() if certain or self.batch[0].crashes > 1 else None


def calls_of(
    sink: VerdictSink, indices: Sequence[int], items: Sequence[ScoringInput], max_items: int
) -> Iterator[Call]:
    """Divide the items of a `submit` into calls of at most `max_items` consecutive items."""
    for start in range(0, len(items), max_items):
        chunk = slice(start, start + max_items)
        yield Call(items[chunk], [(sink, index) for index in indices[chunk]])


def next_batch(queue: deque[Call]) -> list[Call]:
    """Take the next batch from the front of the queue. A call that has crashed a worker gets a batch of its own."""
    batch: list[Call] = []
    size = 0
    while queue and (not batch or size + len(queue[0].items) <= BATCH):
        if batch and (queue[0].crashes or batch[0].crashes):
            break
        size += len(queue[0].items)
        batch.append(queue.popleft())
    return batch


def max_batch_bytes(memory_mb: int) -> int:
    """The most bytes that a message with several calls may have, for a worker with `memory_mb` MiB of memory."""
    return (memory_mb << 20) // MEMORY_SHARE


def batch_message(calls: Sequence[Call], needs: Needs, max_bytes: int) -> tuple[int, bytes]:
    """Make a message of the first call and of as many after it as fit into `max_bytes`; returns their number and the
    JSON.

    Data that the function does not need are left out, and values that several items share are written once.
    """
    subjects: list[str] = []
    numbers: dict[tuple[int, int, int, str], int] = {}

    def subject(item: ScoringInput) -> int:
        key = (id(item.gold), id(item.row), id(item.prompt), item.source)
        if key not in numbers:
            numbers[key] = len(subjects)
            row, prompt = item.row if needs.row else {}, item.prompt if needs.prompt else ""
            subjects.append(json.dumps([item.gold, row, prompt, item.source]))
        return numbers[key]

    texts: list[str] = []
    size = 0
    for call in calls:
        before = len(subjects)
        rows = [[item.response, subject(item), list(item.ids) if needs.ids else []] for item in call.items]
        text = json.dumps(rows)
        # `json.dumps` writes ASCII only, so each character is one byte.
        size += len(text) + sum(map(len, subjects[before:]))
        if texts and size > max_bytes:
            del subjects[before:]
            break
        texts.append(text)
    return len(texts), f'{{"calls": [{", ".join(texts)}], "subjects": [{", ".join(subjects)}]}}'.encode()


FIRST = 16
WINDOW = 10_000
_EXCERPT_CHARS = 60
"""Most characters of a response and of a gold that the error about too many failures quotes."""


class FailureCount:
    """Counts how many of the latest WINDOW responses a reward function failed on."""

    def __init__(self, section: RewardSection, key: str = "reward.function") -> None:
        self._section, self._key = section, key
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._failures = 0

    def add(self, failed: bool, why: str, response: str, gold: object) -> None:
        """Count one response; RewardFailure if the share of failures exceeds `reward.max_failure_share`.

        The share is the number of failures divided by the number of responses, or by FIRST if that is larger. With the
        default of 1 %, one failure among the first 99 responses ends the run.
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
                f"{_excerpt(response)} and the gold {_excerpt(gold)}: fix the {fix}, or raise reward.max_failure_share "
                f"(now {share:g})",
                self._key,
            )


def _excerpt(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    excerpt = text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "..."
    return repr(excerpt) if isinstance(value, str) else excerpt
