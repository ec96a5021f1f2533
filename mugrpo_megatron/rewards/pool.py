"""The verifier: scores responses in worker processes with a hard wall-clock kill, in order, from any thread."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from types import TracebackType

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.failures import FailureCount
from mugrpo_megatron.rewards.literal import settle
from mugrpo_megatron.rewards.process import WorkerProcess, start_worker
from mugrpo_megatron.rewards.scores import Pending, Score
from mugrpo_megatron.rewards.worker import Graded

START_TIMEOUT_S = 120.0
BATCH = 16
"""Comparisons sent to a worker at once: enough to hide the round trip, few enough to lose little time at the end."""
CACHE_ENTRIES = 16_384

Comparison = tuple[str | None, str, str | None]
"""(answer, or a user's function's response; gold; response where its form counts). No answer: the verdict is known."""


@dataclass(slots=True)
class _Task:
    """One comparison, and where its score goes."""

    key: Comparison
    waiting: list[tuple[Pending, int]]
    known: Score | None = None
    """The verdict where it needs no worker, and only the response's form does."""
    deaths: int = 0
    """Workers that died on it."""


@dataclass(slots=True)
class _Worker:
    process: WorkerProcess
    deadline: float
    ready: bool = False
    graded: int = 0
    batch: deque[_Task] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        return bool(self.batch) or not self.ready


class Verifier:
    """Scores responses; a context manager. Workers start when the first response needs one.

    A comparison is given up after an eighth of `timeout_s` in processor time. If that alarm has no effect, the worker
    is killed at `timeout_s` and replaced, and the rest of its batch goes to other workers. Both score 0.
    `submit` may be called from any thread.
    """

    def __init__(self, section: RewardSection) -> None:
        self._section = section
        self._is_math = section.function == "math"
        self._limit = section.workers or max(1, usable_cores() // 2)
        self._failures = FailureCount(section)
        self._lock = threading.Lock()  # guards the four below
        self._error: Exception | None = None
        self._queue: deque[_Task] = deque()
        self._open: dict[Comparison, _Task] = {}
        self._cache: OrderedDict[Comparison, Score] = OrderedDict()
        self._workers: list[_Worker] = []  # only the dispatching thread uses it
        self._wake_out, self._wake_in = os.pipe()
        self._closing = False
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)

    def __enter__(self) -> Verifier:
        """Start dispatching; a user's function is loaded at once, so that a wrong name is found at the start."""
        self._thread.start()
        if not self._is_math:
            self._loaded.wait()
            if self._error is not None:
                self.__exit__(None, None, None)
                raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def score(self, responses: Sequence[str], golds: Sequence[str]) -> list[Score]:
        """Scores of `responses` against `golds`, in order; blocks until all are done."""
        return self.submit(responses, golds).result()

    def submit(self, responses: Sequence[str], golds: Sequence[str]) -> Pending:
        """Start scoring and return at once; literal answers are scored here, the others go to the workers.

        Raises what ended the verifier, when it has ended.
        """
        if self._error is not None:
            raise self._error
        pending = Pending(len(responses))
        queued = False
        for place, (response, gold) in enumerate(zip(responses, golds, strict=True)):
            form = response if self._section.format_weight else None
            if not self._is_math:
                queued |= self._enqueue(_Task((response, gold, form), [(pending, place)]))
            elif not isinstance(settled := settle(response, gold, self._section), Score):
                queued |= self._enqueue(_Task((settled, gold, form), [(pending, place)]))
            elif form is not None:
                queued |= self._enqueue(_Task((None, gold, form), [(pending, place)], settled))
            else:
                pending.put(place, settled)
        if queued:
            self._wake()
        return pending

    def _enqueue(self, task: _Task) -> bool:
        """Whether a new task was queued; a comparison that is cached or in flight is not repeated."""
        key, (pending, place) = task.key, task.waiting[0]
        with self._lock:
            if self._error is not None:
                raise self._error
            # A user's function may give the same response another reward.
            if self._is_math and (score := self._cache.get(key)):
                self._cache.move_to_end(key)
            elif self._is_math and (same := self._open.get(key)):
                same.waiting.append((pending, place))
                return False
            else:
                self._queue.append(task)
                self._open[key] = task
                return True
        pending.put(place, score)
        return False

    def _finish(self, task: _Task, graded: Graded) -> None:
        answer, gold, _ = task.key
        if not self._is_math:
            try:
                self._failures.add(graded.failed, graded.why, answer or "", gold)
            except UserError as error:
                for pending, _ in task.waiting:
                    pending.fail(error)
                raise
        score = task.known or Score(graded.reward, (answer or "") if self._is_math else "", graded.why, graded.seconds)
        score = replace(score, well_formed=graded.well_formed)
        with self._lock:
            self._open.pop(task.key, None)
            if self._is_math:
                self._cache[task.key] = score
            if len(self._cache) > CACHE_ENTRIES:
                self._cache.popitem(last=False)
        for pending, place in task.waiting:
            pending.put(place, score)

    def _give_up(self, task: _Task, why: str, seconds: float = 0.0) -> None:
        """Score 0 a task that ended its worker."""
        formed = None if task.key[2] is None else False
        self._finish(task, Graded(0.0, why, seconds, True, formed, True))

    def _wake(self) -> None:
        os.write(self._wake_in, b"x")

    def _run(self) -> None:
        """The dispatching thread. However it ends, every caller gets an answer and every worker is killed."""
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
        """Wait for a result, a worker's death, a deadline or new work, and handle what happened."""
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
                        f"a verifier process did not start in {START_TIMEOUT_S:g} s: is the machine overloaded?"
                    )
                task = worker.batch.popleft()
                self._discard(worker)
                self._give_up(task, f"killed after {self._section.timeout_s:g} s", self._section.timeout_s)

    def _dispatch(self) -> None:
        """Start workers for the queue, up to the limit, and send a batch to every idle one."""
        with self._lock:
            queued = len(self._queue)
        if not self._is_math and not self._workers:
            queued += 1  # the first one loads the user's function before there is a response
        while (
            queued
            and len(self._workers) < self._limit
            and not any(worker.ready and not worker.busy for worker in self._workers)
        ):
            self._workers.append(_Worker(start_worker(self._section), time.monotonic() + START_TIMEOUT_S))
            queued -= BATCH
            if queued <= 0:
                break
        for worker in list(self._workers):
            if worker.busy:
                continue
            with self._lock:
                worker.batch.extend(self._queue.popleft() for _ in range(min(BATCH, len(self._queue))))
            if worker.batch:
                worker.deadline = time.monotonic() + self._section.timeout_s
                try:
                    worker.process.send([task.key for task in worker.batch])
                except OSError:  # it died while it was idle, or does not read
                    self._discard(worker)
                    self._wake()

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.process.receive()
        except (EOFError, OSError):
            self._handle_death(worker)
            return
        if not worker.ready:
            if "failed" in message:
                raise UserError(
                    f"reward.function {self._section.function!r} cannot be loaded ({message['failed']}): "
                    "name it as module:function, importable from the current directory"
                )
            worker.ready = True
            self._loaded.set()
            return
        graded = Graded(*message)
        task = worker.batch.popleft()
        worker.graded += 1
        worker.deadline = time.monotonic() + self._section.timeout_s
        if graded.retires:
            self._discard(worker)
        self._finish(task, graded)

    def _handle_death(self, worker: _Worker) -> None:
        """A worker died. Its task is retried once unless the worker was fresh: earlier tasks may be the cause."""
        if not worker.ready:
            cause = "is reward.worker_memory_mb too small?"
            if not self._is_math:
                cause = f"does the module of reward.function {self._section.function!r} exit, or need more memory?"
            raise UserError(f"a verifier process died while it started ({worker.process.ending()}): {cause}")
        dead = None
        if worker.batch:
            worker.batch[0].deaths += 1
            if worker.graded == 0 or worker.batch[0].deaths > 1:
                dead = worker.batch.popleft()
        how = worker.process.ending()
        self._discard(worker)
        if dead is not None:
            self._give_up(dead, f"the worker died ({how}): out of memory, or the parser crashed")

    def _discard(self, worker: _Worker) -> None:
        """End a worker; the rest of its batch goes back to the front of the queue."""
        self._workers.remove(worker)
        worker.process.kill()
        with self._lock:
            self._queue.extendleft(reversed(worker.batch))

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            tasks = [*self._queue, *(task for worker in self._workers for task in worker.batch)]
            self._queue.clear()
            self._open.clear()
        self._loaded.set()
        for task in tasks:
            for pending, _ in task.waiting:
                pending.fail(error)
