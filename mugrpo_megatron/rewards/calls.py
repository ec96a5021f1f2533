"""Calls of a reward function as the dispatcher holds them: in batches, one batch to a worker at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mugrpo_megatron.rewards.items import Item, Needs, Verdict
from mugrpo_megatron.rewards.process import WorkerProcess

BATCH = 16
"""Responses sent to a worker at once, unless one call is over more: enough to hide the round trip, few enough to lose
little time at the end."""

Form = str | None
"""A response whose form counts, else None."""


class Taker(Protocol):
    """Where verdicts go."""

    def put(self, place: int, verdict: Verdict) -> None:
        """Called once for every place."""

    def fail(self, error: Exception) -> None:
        """Called when the missing verdicts will never come."""


@dataclass(slots=True)
class Call:
    """One call of the function, over one or more responses."""

    items: Sequence[Item]
    forms: Sequence[Form]
    waiting: list[tuple[Taker, int]]
    """Where the verdict on each item goes; of a single item, it goes to all of them."""
    known: Verdict | None = None
    """The verdict where it needs no worker, and only the response's form does."""
    deaths: int = 0
    """Workers that died on it."""

    def answer(self, verdicts: Sequence[Verdict]) -> None:
        """Hand over the verdicts."""
        for number, (taker, place) in enumerate(self.waiting):
            taker.put(place, verdicts[number if len(verdicts) > 1 else 0])

    def fail(self, error: Exception) -> None:
        """Hand over an error."""
        for taker, _ in self.waiting:
            taker.fail(error)


@dataclass(slots=True)
class Worker:
    """A worker process and what it is at work on."""

    process: WorkerProcess
    deadline: float
    """When it is killed, by the monotonic clock."""
    ready: bool = False
    answered: int = 0
    """Calls."""
    batch: deque[Call] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        return bool(self.batch) or not self.ready


def calls_of(
    taker: Taker, places: Sequence[int], items: Sequence[Item], forms: Sequence[Form], most: int
) -> Iterator[Call]:
    """Calls over at most `most` consecutive items."""
    for start in range(0, len(items), most):
        part = slice(start, start + most)
        yield Call(items[part], forms[part], [(taker, place) for place in places[part]])


def next_batch(queue: deque[Call]) -> list[Call]:
    """Take the calls that a worker gets next from the front of the queue."""
    batch: list[Call] = []
    size = 0
    while queue and (not batch or size + len(queue[0].items) <= BATCH):
        size += len(queue[0].items)
        batch.append(queue.popleft())
    return batch


def message(calls: Sequence[Call], needs: Needs) -> dict[str, Any]:
    """A batch as it goes to a worker: what the function does not need stays here, what items share is sent once."""
    subjects: list[list[Any]] = []
    numbers: dict[tuple[int, int, int, str], int] = {}

    def subject(item: Item) -> int:
        key = (id(item.gold), id(item.row), id(item.prompt), item.source)
        if key not in numbers:
            numbers[key] = len(subjects)
            subjects.append(
                [item.gold, item.row if needs.row else {}, item.prompt if needs.prompt else "", item.source]
            )
        return numbers[key]

    def sent(call: Call) -> list[list[Any]]:
        return [
            [None if call.known else item.response, form, subject(item), list(item.ids) if needs.ids else []]
            for item, form in zip(call.items, call.forms, strict=True)
        ]

    return {"calls": [sent(call) for call in calls], "subjects": subjects}
