"""One queue of prompts for all engines: they claim groups from a shared counter as they have capacity.

There is no dispatcher. Every leader holds the same list of the groups that a stage lacks; a leader that adds n to the
counter `claimed` owns the n groups that the counter passed. An engine with long responses claims fewer, so it delays
no other engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mugrpo_megatron.engine.unfinished import Unfinished
from mugrpo_megatron.engine.wire import Work
from mugrpo_megatron.samples import UNFINISHED, Prompt, Response
from mugrpo_megatron.stages.unfinished import Begun

Add = Callable[[str, int], int]
"""(counter, amount) -> the counter's new value; atomic over all engines."""

CLAIM = 64
"""Most groups claimed at once."""


class PromptQueue:
    """The groups of one round of generation, as one engine sees them; `add` connects it to the other engines."""

    def __init__(self, groups: Sequence[int], engines: int = 1, add: Add | None = None) -> None:
        """`groups` are the same on every engine; without `add` this is the only engine."""
        self._groups = groups
        self._engines = engines
        self._add = add or _counters_of_one()
        self._exhausted = not groups

    @property
    def total(self) -> int:
        """Groups of this round."""
        return len(self._groups)

    def take(self, held: int, slots: int) -> list[int]:
        """The next groups of an engine that holds `held` unfinished ones and decodes `slots` together.

        While many groups are left, an engine holds twice what it decodes, so that it never waits for the queue. Once
        the rest fits into the engines' slots, it holds only what it decodes: a group that would wait inside one engine
        is better left to the next engine with a free slot. A round that fits into the slots from its start is shared
        evenly. Returns an empty list when there is nothing to take now, and with `held` = 0 when the round is over.
        """
        if self._exhausted:
            return []
        left = len(self._groups) - self._add("claimed", 0)
        plenty = left >= self._engines * slots
        depth = 2 * slots if plenty else min(slots, -(-len(self._groups) // self._engines))
        room = min(depth - held, CLAIM)
        if room <= 0:
            return []
        if 2 * self._add("out", 0) >= self._engines:
            self._exhausted = True
            return []
        end = self._add("claimed", room)
        self._exhausted = end >= len(self._groups)
        return list(self._groups[end - room : end])

    def leave(self) -> None:
        """Report that this engine failed. Once half of the engines have, all stop claiming, to restart together."""
        self._add("out", 1)

    def close(self) -> None:
        """Stop all engines' claims: the run was asked to stop."""
        self._add("out", self._engines)

    def finished(self, tokens: int) -> None:
        """Count a finished group and its tokens."""
        self._add("groups", 1)
        self._add("tokens", tokens)

    def totals(self) -> tuple[int, int]:
        """Groups and tokens that all engines together have finished in this round."""
        return self._add("groups", 0), self._add("tokens", 0)


def _counters_of_one() -> Add:
    counters: Counter[str] = Counter()

    def add(name: str, amount: int) -> int:
        counters[name] += amount
        return counters[name]

    return add


MOST_LOADS = 240
"""Readings that a record keeps of one generation, however long it takes."""


@dataclass(frozen=True, slots=True)
class Load:
    """One reading."""

    time: float
    """Unix seconds."""
    tokens: int
    """Sampled since the generation began, those of unfinished responses included."""
    running: int
    """Requests that are decoded together."""
    queued: int
    """Requests that the engine holds and does not decode yet."""
    kv_use: float
    """Share of the KV cache that holds tokens."""

    def metrics(self) -> dict[str, float]:
        """What a row of the metric log says of it, besides its time."""
        return {"tokens": self.tokens, "running": self.running, "queued": self.queued, "kv_use": self.kv_use}


def read_load(tokens: int, snapshots: Sequence[Any]) -> Load:
    """The engine's load from what its schedulers have published, one snapshot for each that works on its own data."""
    return Load(
        time=time.time(),
        tokens=tokens,
        running=sum(one.num_running_reqs for one in snapshots),
        queued=sum(one.num_waiting_reqs for one in snapshots),
        kv_use=max((float(one.token_usage) for one in snapshots), default=0.0),
    )


@dataclass(slots=True)
class LoadRecord:
    """Readings of one generation, evenly spread: when there are too many, every second one is dropped."""

    loads: list[Load] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, load: Load) -> None:
        if self._seen % self._every == 0:
            self.loads.append(load)
        self._seen += 1
        if len(self.loads) > MOST_LOADS:
            del self.loads[1::2]
            self._every *= 2


Answered = list[tuple[Prompt, list[Response]]]


def empty(version: int) -> Response:
    """A response without tokens."""
    return Response(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), UNFINISHED, version)


def without_last(response: Response) -> Response:
    """An interrupted response without its last token; a finished one as it is."""
    if response.finish_reason != UNFINISHED or not len(response.ids):
        return response
    return replace(
        response,
        ids=response.ids[:-1],
        logprobs=response.logprobs[:-1],
        kept=None if response.kept is None else response.kept[:-1],
        routes=None if response.routes is None else response.routes[:, :-1],
    )


def joined(first: Response, then: Response) -> Response:
    """A response and its continuation, which finishes as the continuation does.

    Routes of the continuation count from the prompt's start, so those of the places that `first` has are left out.
    """
    if not len(first.ids) and first.routes is None:
        return then
    kept, routes = then.kept, then.routes
    if first.kept is not None and kept is not None:
        kept = np.concatenate([first.kept, kept])
    if first.routes is not None and routes is not None:
        routes = np.concatenate([first.routes, routes[:, first.routes.shape[1] :]], axis=1)
    return Response(
        np.concatenate([first.ids, then.ids]),
        np.concatenate([first.logprobs, then.logprobs]),
        then.finish_reason,
        then.weight_version,
        routes if len(then.ids) else first.routes,
        kept if len(then.ids) else first.kept,
    )


class Flight:
    """A prompt that an engine answers: what it had of each response before, and what has come since."""

    def __init__(self, prompt: Prompt, n: int, begun: Sequence[Response] | None = None) -> None:
        """`begun` are n responses, finished or not; None where there is nothing of any."""
        self.prompt, self._n = prompt, n
        self._begun = list(begun) if begun else None
        self._open = [p for p, one in enumerate(begun) if one.finish_reason == UNFINISHED] if begun else range(n)
        self._grown: dict[int, list[Response]] = {}

    @property
    def whole(self) -> list[Response] | None:
        """The group, if nothing of it is left to sample."""
        return self._begun if not self._open else None

    def work(self, key: int) -> Work:
        """What the engine is asked for."""
        if self._begun is None:
            return Work(key, self.prompt.ids, self._n, self.prompt.index)
        begun = [self._begun[place].ids.tolist() for place in self._open]
        return Work(key, self.prompt.ids, len(self._open), self.prompt.index, begun)

    def grow(self, place: int, piece: Response) -> None:
        """Add tokens of the `place`-th response that was asked for."""
        self._grown.setdefault(place, []).append(piece)

    def answered(self, responses: Sequence[Response]) -> list[Response]:
        """The group with all that the engine has sampled of what it was asked for."""
        if self._begun is None:
            return [without_last(response) for response in responses]
        group = list(self._begun)
        for place, response in zip(self._open, responses, strict=True):
            group[place] = joined(group[place], without_last(response))
        return group

    def lost(self) -> Begun | None:
        """The group as far as it is known where the engine ended without an answer; None where nothing is."""
        if self._begun is None and not self._grown:
            return None
        version = next(iter(self._grown.values()))[0].weight_version if self._grown else 0
        group = list(self._begun) if self._begun else [empty(version)] * self._n
        for place, pieces in self._grown.items():
            whole = pieces[0]
            for piece in pieces[1:]:
                whole = joined(whole, piece)
            group[self._open[place]] = joined(group[self._open[place]], without_last(whole))
        return Begun(self.prompt.ids, group)


class Flights:
    """The prompts of one generation that are in flight, by the keys under which the engine knows them."""

    def __init__(self, n: int, held: Unfinished | None) -> None:
        """`n` responses to each; `held` has what was sampled of them before, and gets what is sampled now."""
        self._n, self._held = n, held
        self._flights: dict[int, Flight] = {}
        self._begun = 0

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, prompts: Sequence[Prompt]) -> tuple[list[Work], Answered]:
        """What to ask the engine for, and the groups that are whole already."""
        work, whole = [], []
        for prompt in prompts:
            flight = Flight(prompt, self._n, self._held.begun(prompt, self._n) if self._held else None)
            if flight.whole is not None:
                whole.append((prompt, flight.whole))
                continue
            self._flights[self._begun] = flight
            work.append(flight.work(self._begun))
            self._begun += 1
        return work, whole

    def take_in(self, kind: str, value: Any) -> Answered:
        """Take in `groups` or `begun` from the engine; the groups that are finished with it."""
        if kind == "begun":
            places, pieces = value
            for place, (key, [piece]) in zip(places, pieces.unpack(), strict=True):
                if key in self._flights:
                    self._flights[key].grow(place, piece)
            return []
        if kind != "groups":
            raise RuntimeError(f"the engine's host sent {kind!r} during a generation")
        finished = []
        for key, responses in value.unpack():
            flight = self._flights.pop(key)
            group = flight.answered(responses)
            if self._held is not None:
                self._held.put(flight.prompt.index, Begun(flight.prompt.ids, group))
            if all(response.finish_reason != UNFINISHED for response in group):
                finished.append((flight.prompt, group))
        return finished

    def leave(self) -> None:
        """The engine answers no more: hold what it has told of the prompts in flight."""
        for flight in self._flights.values():
            if self._held is not None and (left := flight.lost()):
                self._held.put(flight.prompt.index, left)
        self._flights.clear()
