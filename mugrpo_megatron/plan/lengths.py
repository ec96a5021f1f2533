"""Lengths of responses, and how long an engine that decodes many together takes for them.

Lengths are log-normal and cut at the recipe's maximum. An engine decodes up to so many responses together and starts
the next as one ends (continuous batching); at the end ever fewer are left, and the longest decide.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice
from statistics import NormalDist

import numpy as np

QUANTILES = 2048
"""Quantiles that stand for a distribution."""
WAVES = 4
"""Engines full of requests that are simulated: after that many, ends are spread evenly over time."""
DRAWS = 4
"""Simulations that are averaged: the longest of few responses varies."""


def response_lengths(mean: float, longest: int, spread: float, count: int = QUANTILES) -> np.ndarray:
    """Float [count]: ascending quantiles of a log-normal cut at `longest` whose mean after the cut is `mean`."""
    normal = NormalDist()
    shape = np.exp(spread * np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)]))
    low, high = 0.0, float(longest) / shape[0]
    for _ in range(60):  # the mean grows with the scale
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(scale * shape, longest).mean() < mean else (low, scale)
    return np.clip(high * shape, 1.0, longest)


def resident_mean(lengths: np.ndarray) -> float:
    """Mean tokens that a running response has so far: a running one is a long one (length-biased), half done."""
    return float((lengths**2).mean() / lengths.mean() / 2)


def seconds_to_decode(requests: int, slots: int, lengths: np.ndarray, step: Callable[[int], float]) -> float:
    """Seconds until an engine has decoded `requests` responses, `slots` of them together.

    `step(n)` is the seconds of one token for each of n responses. Up to WAVES full engines of requests are simulated
    one by one, with lengths drawn from `lengths`; what is beyond them finds all slots busy.
    """
    if requests <= 0:
        return 0.0
    slots = min(slots, requests)
    simulated = min(requests, WAVES * slots)
    rng = np.random.default_rng(0)
    runs = [_simulate(rng.choice(lengths, simulated), slots, step) for _ in range(DRAWS)]
    return float(np.mean(runs)) + (requests - simulated) * float(lengths.mean()) / slots * step(slots)


def _simulate(lengths: np.ndarray, slots: int, step: Callable[[int], float]) -> float:
    """Seconds for responses of `lengths`, of which `slots` start together and another whenever one ends."""
    order = iter(lengths.tolist())
    ends = sorted(islice(order, slots))
    done = seconds = 0.0  # tokens that a response has which has run from the beginning
    while ends:
        seconds += (ends[0] - done) * step(len(ends))
        done = ends[0]
        following = next(order, None)
        if following is None:
            heapq.heappop(ends)
        else:
            heapq.heapreplace(ends, done + following)
    return seconds
