"""Means over seeds with 95 % intervals, differences between variants on the same seeds, and when a curve gets there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

T975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantile of Student's t by degrees of freedom."""
Z975 = 1.96


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over n values; `half` is half of its 95 % interval (Student's t), None for a single value."""

    value: float
    half: float | None
    n: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.value - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.value + self.half


def mean_of(values: Sequence[float]) -> Mean:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("a mean needs at least one value")
    n = len(values)
    if n == 1:
        return Mean(values[0], None, 1)
    quantile = T975[n - 1] if n - 1 < len(T975) else Z975
    return Mean(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(n), n)


def difference(left: Mapping[int, float], right: Mapping[int, float]) -> Mean | None:
    """Mean of left - right over the seeds that both have; None where they share none."""
    shared = sorted(left.keys() & right.keys())
    return mean_of([left[seed] - right[seed] for seed in shared]) if shared else None


def pooled_deviation(groups: Iterable[Sequence[float]]) -> float | None:
    """Standard deviation inside groups, pooled over all that have two values or more; None without any."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    squares = sum((value - statistics.fmean(group)) ** 2 for group in several for value in group)
    return math.sqrt(squares / freedom) if several else None


def fisher_exact(left: tuple[int, int], right: tuple[int, int]) -> float:
    """Two-sided p of Fisher's exact test for (events, trials): all outcomes at most as likely as this one."""
    (events, trials), (others, rest) = left, right
    total = events + others

    def ways(count: int) -> int:
        return math.comb(trials, count) * math.comb(rest, total - count)

    possible = [ways(count) for count in range(max(0, total - rest), min(trials, total) + 1)]
    return sum(one for one in possible if one <= ways(events)) / sum(possible)


def reached(xs: Sequence[float], ys: Sequence[float], level: float) -> float | None:
    """The x at which a curve of straight lines through the points first comes up to `level`; None if it never does."""
    if ys and ys[0] >= level:
        return xs[0]
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False):
        if y0 < level <= y1:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None
