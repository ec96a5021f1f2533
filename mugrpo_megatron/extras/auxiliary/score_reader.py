"""Reads a judge's scores with the workers, limits and failure share of a reward function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from mugrpo_megatron.recipe.scoring import FunctionSection, RewardSection
from mugrpo_megatron.rewards.dispatch import Dispatcher
from mugrpo_megatron.rewards.items import ScoringInput, Verdict

Reader = Callable[[Sequence[str]], list[Verdict]]
"""A verdict on each answer: its score, or None with the reason."""


class _VerdictQueue:
    """Takes the verdicts on some answers, from the dispatching thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, Verdict] | Exception] = SimpleQueue()

    def put(self, index: int, verdict: Verdict) -> None:
        self._queue.put((index, verdict))

    def fail(self, error: Exception) -> None:
        self._queue.put(error)

    def verdicts(self, count: int) -> list[Verdict]:
        """Wait for `count` verdicts; returns them by index, or raises the error that ended the workers."""
        verdicts: dict[int, Verdict] = {}
        while len(verdicts) < count:
            entry = self._queue.get()
            if isinstance(entry, Exception):
                raise entry
            verdicts[entry[0]] = entry[1]
        return [verdicts[index] for index in range(count)]


@contextmanager
def score_reader(section: RewardSection, judge: FunctionSection, key: str) -> Iterator[Reader]:
    """Yield the reader of a judge's answers, with workers that the block's end ends.

    Raises UserError when the judge's function cannot be loaded. The reader raises RewardFailure for one that exits,
    dies or runs into a limit on more than `reward.max_failure_share` of the answers.
    """

    def read(answers: Sequence[str]) -> list[Verdict]:
        sink = _VerdictQueue()
        dispatcher.submit(sink, range(len(answers)), [ScoringInput(answer, "", "") for answer in answers])
        return sink.verdicts(len(answers))

    settings: dict[str, Any] = {
        "function": judge.parse,
        "functions": {},
        "timeout_s": judge.timeout_s or section.timeout_s,
        "worker_memory_mb": judge.worker_memory_mb or section.worker_memory_mb,
    }
    dispatcher = Dispatcher(section.model_copy(update=settings), f"{key}.parse", of_judge=True)
    dispatcher.start()
    try:
        dispatcher.wait_loaded()
        yield read
    finally:
        dispatcher.close()
