"""The training order: which problem is at which position of an endless stream."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def problem_at(seed: int, n_problems: int, position: int) -> int:
    """Index of the problem at `position` of the stream: a fresh permutation of all problems in every epoch.

    A pure function of its arguments, so a resumed run needs no state to continue where it was.
    """
    epoch, place = divmod(position, n_problems)
    return int(_permutation(seed, n_problems, epoch)[place])


@lru_cache(maxsize=4)
def _permutation(seed: int, n: int, epoch: int) -> np.ndarray:
    """int64 [n]. Sorts raw PCG64 draws: numpy keeps that stream across versions, but not `Generator.permutation`."""
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(draws, kind="stable")
