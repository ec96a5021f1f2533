"""One queue of prompts for all engines: they claim groups from a shared counter as they have capacity.

There is no dispatcher. Every leader holds the same list of the groups that a stage lacks; a leader that adds n to the
counter `claimed` owns the n groups that the counter passed. An engine with long responses claims fewer, so it delays
no other engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

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
