"""The training order: which problem is at which position of an endless stream, and which update at which age."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def problem_at(seed: int, n_problems: int, position: int) -> int:
    """Index of the problem at `position` of the stream: a fresh permutation of all problems in every epoch.

    A pure function of its arguments, so a resumed run needs no state to continue where it was.
    """
    epoch, place = divmod(position, n_problems)
    return int(_permutation(seed, n_problems, epoch)[place])


def update_at(seed: int, stage: int, updates: int, age: int) -> int:
    """Which of the stage's `updates` is taken at `age`: in order in the first pass, a fresh permutation in each later.

    Whole updates change places, and keep their groups: so an update is one row group of the stage in every pass, as are
    its log-probabilities under other policies, and nothing is read or computed twice.
    """
    repeat, place = divmod(age, updates)
    return place if repeat == 0 else int(_permutation(seed, updates, stage, repeat)[place])


@lru_cache(maxsize=4)
def _permutation(seed: int, n: int, *stream: int) -> np.ndarray:
    """int64 [n]. Sorts raw PCG64 draws: numpy keeps that stream across versions, but not `Generator.permutation`."""
    draws = np.random.PCG64(np.random.SeedSequence([seed, *stream])).random_raw(n)
    return np.argsort(draws, kind="stable")
