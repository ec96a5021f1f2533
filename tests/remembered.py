"""The bundled tasks' problems are generated once in a process, and once for all that are forked from it."""

from __future__ import annotations

import functools

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.samples import Problem


def remember_problems() -> None:
    """Exchange `arithmetic.problems`, which takes half a CPU second for the training problems of every command."""
    generated = functools.lru_cache(maxsize=8)(arithmetic.problems)

    def problems(seed: int, split: arithmetic.Split, n: int, task: str = "arithmetic") -> list[Problem]:
        return list(generated(seed, split, n, task))

    arithmetic.problems = problems
