"""One queue of prompts for all engines: a counter that everybody adds to, claimed as capacity frees.

No rank hands out work. Every leader holds the same list of groups that a stage lacks; whoever adds n to the counter of
claims owns the n places that the counter passed. An engine with long responses claims less, so it holds up nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

Add = Callable[[str, int], int]
"""(counter, amount) -> the counter's new value; atomic over all who share it."""

CLAIM = 64
"""Places claimed at once, at most."""


class PromptQueue:
    """What one round of generation has to do, as one engine sees it; the others see the same through `add`."""

    def __init__(self, groups: Sequence[int], engines: int = 1, add: Add | None = None) -> None:
        """`groups` are the same on every engine; without `add` there is no other engine."""
        self._groups = groups
        self._engines = engines
        self._add = add or _counters_of_one()
        self._exhausted = not groups

    @property
    def total(self) -> int:
        """Groups of this round."""
        return len(self._groups)

    def take(self, held: int, slots: int) -> list[int]:
        """Groups to go on with, for an engine that holds `held` unfinished ones and decodes `slots` together.

        While there is plenty, an engine holds twice what it decodes, so that it never waits for the queue. Once what is
        left fits into the engines' slots, it holds no more than it decodes: what would wait inside one engine is better
        left to the next one that frees up. A round that fits into the slots from its start is shared evenly.
        Empty when nothing more is to be taken, now or, when nothing is held, at all.
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
        """Say that this engine failed. Once half of the engines have, nobody claims more: all come back together."""
        self._add("out", 1)

    def close(self) -> None:
        """Let nobody claim more: the run was asked to stop."""
        self._add("out", self._engines)

    def finished(self, tokens: int) -> None:
        """Count a finished group and its tokens."""
        self._add("groups", 1)
        self._add("tokens", tokens)

    def totals(self) -> tuple[int, int]:
        """Groups and tokens that all engines have finished in this round."""
        return self._add("groups", 0), self._add("tokens", 0)


def _counters_of_one() -> Add:
    counters: Counter[str] = Counter()

    def add(name: str, amount: int) -> int:
        counters[name] += amount
        return counters[name]

    return add
