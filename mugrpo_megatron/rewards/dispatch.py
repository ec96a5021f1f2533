"""Gives the calls of one reward function to worker processes, and kills workers that take too long. Thread-safe."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe.scoring import CODE, MATH, RewardSection
from mugrpo_megatron.rewards.calls import (
    BATCH,
    Call,
    FailureCount,
    VerdictSink,
    Worker,
    calls_of,
    max_batch_bytes,
    next_batch,
    start_worker,
)
from mugrpo_megatron.rewards.items import Needs, ScoringInput, Verdict
from mugrpo_megatron.rewards.math.literal import match_literally

START_TIMEOUT_S = 600.0
"""Most seconds that a worker's start may take, and its reading of a batch. They do not count as the function's time."""
CACHE_ENTRIES = 16_384

Comparison = tuple[str, str]
"""(answer, gold): the texts that `math` compares."""


class Dispatcher:
    """The queue and the workers of one reward function.

    Workers start when responses need them. Only the first worker of a function other than `math` starts with the
    dispatcher, to load the function.

    A call is given up after an eighth of `timeout_s` in CPU time, by an alarm in the worker. If the alarm has no
    effect, the worker is killed after `timeout_s` by the clock, or later if it computes and the machine is slow or busy
    (`Overtime`); a new worker takes over the rest of its batch. In both cases the call scores 0. A call of n responses
    has n times these limits.
    """

    def __init__(self, section: RewardSection, key: str, of_judge: bool = False) -> None:
        """Prepare the dispatcher of `section.function`, which the recipe has at `key`; it runs after `start`.

        `of_judge` says that the function is a judge's `parse`, which reads the score in the judge's answer.
        """
        self._section, self._key, self._of_judge = section, key, of_judge
        self._title = f"{key} {section.function!r}"
        self._is_math = section.function == MATH
        self._needs = Needs()
        self._limit = section.workers or max(1, usable_cores() // 2)
        self._max_bytes = max_batch_bytes(section.worker_memory_mb)
        self._failures = FailureCount(section, key)
        self._lock = threading.Lock()  # guards the four fields below
        self._error: Exception | None = None
        self._queue: deque[Call] = deque()
        self._in_flight: dict[Comparison, Call] = {}
        self._cache: OrderedDict[Comparison, Verdict] = OrderedDict()
        self._workers: list[Worker] = []  # without a lock, since only the dispatching thread uses it
        self._wake_out, self._wake_in = os.pipe()
        self._closing = False
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"verifier: {key}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_loaded(self) -> None:
        """Wait until a worker has loaded the function; UserError when it cannot be loaded. Returns at once for
        `math`."""
        if not self._is_math:
            self._loaded.wait()
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """End all workers; calls that are not finished fail."""
        self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def submit(self, sink: VerdictSink, indices: Sequence[int], items: Sequence[ScoringInput]) -> None:
        """Start to score the items and return at once. Raises the error that has ended the dispatcher, if one has."""
        if self._error is not None:
            raise self._error
        if self._is_math:
            queued = [self._match_or_queue(sink, index, item) for index, item in zip(indices, items, strict=True)]
        else:
            if self._section.function == CODE:
                items = [replace(item, response=item.opening + item.response) for item in items]
            queued = [self._enqueue(call) for call in calls_of(sink, indices, items, self._needs.responses)]
        if any(queued):
            self._wake()

    def _match_or_queue(self, sink: VerdictSink, index: int, item: ScoringInput) -> bool:
        """Score the item at once if its answer needs no parser (`match_literally`), else queue the comparison of answer
        and gold by `math`; returns whether a call was queued."""
        verdict_or_answer = match_literally(item.opening + item.response, item.answer, self._section)
        if isinstance(verdict_or_answer, str):
            return self._enqueue(Call([ScoringInput(verdict_or_answer, item.answer, item.answer)], [(sink, index)]))
        sink.put(index, verdict_or_answer)
        return False

    def _enqueue(self, call: Call) -> bool:
        """Queue a call, unless the comparison that it makes has a result already or is being made; returns whether it
        was queued."""
        key = self._comparison(call)
        cached = None
        with self._lock:
            if self._error is not None:
                raise self._error
            if key is not None and (cached := self._cache.get(key)):
                self._cache.move_to_end(key)
            elif key is not None and (in_flight := self._in_flight.get(key)):
                in_flight.sinks += call.sinks
                return False
            else:
                self._queue.append(call)
                if key is not None:
                    self._in_flight[key] = call
        if cached is not None:
            call.finish([cached])
        return cached is None

    def _comparison(self, call: Call) -> Comparison | None:
        """The comparison that a call to `math` makes. None for other functions: they may give another result each
        time."""
        if not self._is_math:
            return None
        return call.items[0].response, call.items[0].answer

    def _finish(self, call: Call, verdicts: Sequence[Verdict]) -> None:
        if not self._is_math:
            try:
                for item, verdict in zip(call.items, verdicts, strict=True):
                    self._failures.add(verdict.failed, verdict.why, item.response, item.gold)
            except UserError as error:
                call.fail(error)
                raise
        else:
            # An answer on which the parser fails or takes too long scores 0. That is the response's fault, and not a
            # failure of the function.
            verdicts = [verdicts[0]._replace(extracted=call.items[0].response, failed=False)]
        if (key := self._comparison(call)) is not None:
            with self._lock:
                self._in_flight.pop(key, None)
                self._cache[key] = verdicts[0]
                if len(self._cache) > CACHE_ENTRIES:
                    self._cache.popitem(last=False)
        call.finish(verdicts)

    def _give_up(self, call: Call, why: str, seconds: float = 0.0, unread: bool = False) -> None:
        """Score a call 0, because its worker was killed, crashed, or could not read it."""
        # If a worker of `code` crashes or is killed, that is the tested program's fault and no failure of the function.
        failed = unread or self._section.function != CODE
        self._finish(call, [Verdict(0.0, "", why, seconds / len(call.items), failed)] * len(call.items))

    def _wake(self) -> None:
        os.write(self._wake_in, b"x")

    def _run(self) -> None:
        """Dispatch calls until `close`. However this thread ends, unfinished calls fail and all workers are killed."""
        failure: Exception = RuntimeError("the verifier was closed before everything was scored")
        try:
            while not self._closing:
                self._dispatch()
                self._handle_events()
        except Exception as error:
            failure = error
            self._closing = True
        finally:
            self._fail_all(failure)
            for worker in self._workers:
                worker.process.end()
            for worker in self._workers:
                worker.process.kill()

    def _handle_events(self) -> None:
        """Wait for a result, a worker's death, a deadline or new calls, and handle what has happened."""
        deadlines = [worker.deadline for worker in self._workers if worker.busy]
        patience = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        readable = wait([self._wake_out, *(worker.process.connection for worker in self._workers)], patience)
        if self._wake_out in readable:
            os.read(self._wake_out, 65536)
        for worker in list(self._workers):
            if worker.process.connection in readable:
                self._receive(worker)
            elif worker.busy and time.monotonic() >= worker.deadline:
                if not worker.ready:
                    raise UserError(
                        f"a verifier process of {self._title} did not start in {START_TIMEOUT_S:g} s: run the same "
                        "command again when the machine is less busy, or make the import of the function faster"
                    )
                if worker.reading:
                    self._handle_death(worker)
                    continue
                limit = self._limit_s(worker.batch[0])
                if not worker.is_late(limit):
                    continue
                call = worker.batch.popleft()
                self._discard(worker)
                self._give_up(call, f"killed after {limit:g} s", limit)

    def _dispatch(self) -> None:
        """Start workers if the queue needs them, up to the limit, and send each idle worker a batch."""
        with self._lock:
            queued = len(self._queue)
        if not self._is_math and not self._workers:
            queued += 1  # the first worker loads the function before there is a response
        while (
            queued
            and len(self._workers) < self._limit
            and not any(worker.ready and not worker.busy for worker in self._workers)
        ):
            self._workers.append(
                Worker(start_worker(self._section, self._key, self._of_judge), time.monotonic() + START_TIMEOUT_S)
            )
            queued -= BATCH if self._needs.responses == 1 else 1
            if queued <= 0:
                break
        for worker in list(self._workers):
            if not worker.busy:
                self._send(worker)

    def _send(self, worker: Worker) -> None:
        """Send an idle worker the next batch of the queue, if there is one."""
        if worker.process.connection.poll():  # the worker has died while it was idle, which `_receive` handles
            return
        with self._lock:
            worker.batch.extend(next_batch(self._queue))
        if not worker.batch:
            return
        text, unsent = worker.message(self._needs, self._max_bytes)
        with self._lock:
            self._queue.extendleft(reversed(unsent))
        try:
            worker.process.send(text)
        except OSError:  # the worker has died, or does not read
            self._handle_death(worker)
            self._wake()
        else:
            worker.limit(START_TIMEOUT_S)

    def _receive(self, worker: Worker) -> None:
        try:
            reply = worker.process.receive()
        except (EOFError, OSError):
            self._handle_death(worker)
            return
        if not worker.ready:
            if "failed" in reply:
                raise UserError(reply["failed"])
            self._needs = Needs(*reply["needs"])
            if reply["note"] and not self._loaded.is_set():
                print(f"mugrpo: {reply['note']}", file=sys.stderr)
            worker.ready = True
            self._loaded.set()
            return
        if worker.reading:
            worker.reading = False
            worker.limit(self._limit_s(worker.batch[0]))
            return
        call = worker.batch.popleft()
        worker.finished_calls += 1
        if worker.batch:
            worker.limit(self._limit_s(worker.batch[0]))
        if reply["retires"]:
            self._discard(worker)
        self._finish(call, [Verdict(*verdict) for verdict in reply["verdicts"]])

    def _handle_death(self, worker: Worker) -> None:
        """Remove a worker that has died, or has not read its batch in START_TIMEOUT_S; give up or retry its call.

        Raises UserError if the worker died while it started.
        """
        if not worker.ready:
            remedy = "if it ran out of memory, raise reward.worker_memory_mb"
            if not self._is_math:
                remedy = f"the module of {self._title} must not exit; {remedy}"
            raise UserError(f"a verifier process died while it started ({worker.process.exit_status()}): {remedy}")
        memory, unread = self._section.worker_memory_mb, worker.reading
        if unread:
            size = f"{worker.batch_bytes / 2**20:,.1f} MiB"
            why = f"no room for its {size} in a worker (raise worker_memory_mb, now {memory})"
        else:
            cause = "or the parser crashed" if self._is_math else "or the function ended it or closed its files"
            why = f"the worker died ({worker.process.exit_status()}): out of memory, {cause}"
        crashed = worker.crashed_call()
        self._discard(worker)
        if crashed is not None:
            self._give_up(crashed, why, unread=unread)

    def _discard(self, worker: Worker) -> None:
        """Kill a worker, and put the rest of its batch back at the front of the queue."""
        self._workers.remove(worker)
        worker.process.kill()
        with self._lock:
            self._queue.extendleft(reversed(worker.batch))

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            calls = [*self._queue, *(call for worker in self._workers for call in worker.batch)]
            self._queue.clear()
            self._in_flight.clear()
        self._loaded.set()
        for call in calls:
            call.fail(error)

    def _limit_s(self, call: Call) -> float:
        return self._section.timeout_s * len(call.items)
