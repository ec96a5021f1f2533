"""Models response lengths, and the time in which engines with continuous batching decode them.

Lengths are log-normal, cut at the recipe's maximum. An engine decodes up to `slots` responses together and starts the
next one when one ends. Towards the end fewer and fewer responses run, and the longest ones decide the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

QUANTILES = 2048
"""Number of quantiles that represent a distribution."""
WAVES = 4
"""The simulation covers as many responses as fill an engine this many times. The time of the others is extrapolated,
since responses then end evenly over time."""
DRAWS = 4
"""Number of simulations that are averaged, since the longest of few responses varies."""

Supply = Callable[[int], float | None]
"""Number of responses that an engine is decoding -> length of the next one, or None if there is none now."""


def response_lengths(mean: float, longest: int, spread: float) -> np.ndarray:
    """Float [QUANTILES]: ascending quantiles of a log-normal cut at `longest` whose mean after the cut is `mean`."""
    normal = NormalDist()
    shape = np.exp(spread * np.array([normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)]))
    low, high = 0.0, float(longest) / shape[0]
    for _ in range(60):  # bisection: the mean length grows with the scale
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(scale * shape, longest).mean() < mean else (low, scale)
    return np.clip(high * shape, 1.0, longest)


def resident_mean(lengths: np.ndarray) -> float:
    """Mean number of tokens that a running response has so far: half of its length on average. A response is found
    running in proportion to its length, so long ones count more in the mean."""
    return float((lengths**2).mean() / lengths.mean() / 2)


def seconds_to_decode(requests: int, slots: int, lengths: np.ndarray, step: Callable[[int], float]) -> float:
    """Seconds until an engine has decoded `requests` responses, `slots` of them together.

    `step(n)` is the seconds of one token for each of n responses. Up to WAVES full engines of requests are simulated,
    with lengths drawn from `lengths`; the others are decoded with all slots busy.
    """
    if requests <= 0:
        return 0.0
    slots = min(slots, requests)
    simulated = min(requests, WAVES * slots)
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(DRAWS):
        runs += decode([_supply(rng.choice(lengths, simulated).tolist())], slots, step)
    return float(np.mean(runs)) + (requests - simulated) * float(lengths.mean()) / slots * step(slots)


def _supply(lengths: list[int]) -> Supply:
    """A supply that gives one length after the other, however many responses are running."""
    queue = iter(lengths)
    return lambda running: next(queue, None)


def decode(supplies: Sequence[Supply], slots: int, step: Callable[[int], float]) -> list[float]:
    """Simulate engines with continuous batching; return the seconds at which each has decoded its last token.

    An engine asks its supply whenever it has a free slot: at the start, and when one of its responses ends. Engines may
    share a queue through their supplies.
    """
    # `tokens` has for each engine the number of tokens that each of its slots has decoded since the start. `ends` has
    # for each engine a heap of the values of `tokens` at which its running responses end.
    ends: list[list[float]] = [[] for _ in supplies]
    tokens = [0.0] * len(supplies)
    seconds = [0.0] * len(supplies)
    events: list[tuple[float, int]] = []

    def refill(engine: int) -> None:
        running = ends[engine]
        while len(running) < slots and (length := supplies[engine](len(running))) is not None:
            heapq.heappush(running, tokens[engine] + length)
        if running:
            duration = (running[0] - tokens[engine]) * step(len(running))
            heapq.heappush(events, (seconds[engine] + duration, engine))

    for engine in range(len(supplies)):
        refill(engine)
    while events:
        now, engine = heapq.heappop(events)
        seconds[engine], tokens[engine] = now, heapq.heappop(ends[engine])
        refill(engine)
    return seconds
