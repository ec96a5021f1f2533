"""Estimators from K responses to each problem: mean@k, pass@k, majority@k, with 95 % intervals clustered by problem."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mugrpo_megatron.recipe.scoring import MEAN

Measure = Literal["accuracy", "reward"]
"""Name of a held-out set's mean: `accuracy`, a fraction of correct responses, or `reward`, of any size."""
Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval. The ends are infinite if equal values leave the spread unknown."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that k of the `samples`, drawn without replacement, include a correct one: an unbiased estimate of
    pass@k.

    Source: Chen et al. 2021 (Codex), equation 1: 1 - C(n-c, k) / C(n, k). Raises ValueError unless 1 <= k <= samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """Mean reward of the most frequent answer; of equally frequent ones, the average of their mean rewards.

    The average is the expectation if one of the most frequent answers is drawn at random, so the order of the samples
    does not matter. Empty answers do not vote; without any vote the result is 0.
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    means = []
    for winner in (answer for answer, count in votes.items() if count == most):
        winner_rewards = [reward for answer, reward in zip(answers, rewards, strict=True) if answer == winner]
        means.append(sum(winner_rewards) / len(winner_rewards))
    return sum(means) / len(means)


def clustered_interval(per_problem: Sequence[float], samples: int = 1) -> Interval:
    """Mean over problems of one value in [0, 1] for each, with a 95 % interval that treats problems as the sample.

    It is a Wilson score interval at the effective sample size p(1-p)/v, where v is the variance of the mean between
    problems (Dean & Pagano 2015, the modified Wilson interval). With one sample for each problem it is Wilson's own
    interval. The effective size is at most problems * samples. If all values are 0 or all are 1, p(1-p)/v is 0/0, and
    the number of problems is taken instead. Raises ValueError without problems.
    """
    if not len(per_problem):
        raise ValueError("an interval needs at least one problem")
    values = np.asarray(per_problem, dtype=np.float64)
    n = len(values)
    p = float(values.mean())
    variance = float(values.var()) / n
    spread = p * (1.0 - p)
    if spread <= 0.0:
        size = float(n)
    elif variance <= spread / (n * samples):
        size = float(n * samples)
    else:
        size = spread / variance
    return _wilson(p, size)


def mean_interval(per_problem: Sequence[float]) -> Interval:
    """Mean over problems of one value of any size for each, with Student's 95 % interval that treats problems as the
    sample.

    The quantile is that of `student`. If all values are equal, or there is only one, they do not say how far rewards
    spread, and the interval is infinite. Raises ValueError without problems.
    """
    if not len(per_problem):
        raise ValueError("an interval needs at least one problem")
    values = np.asarray(per_problem, dtype=np.float64)
    mean = float(values.mean())
    if values.min() == values.max():
        return Interval(mean, -math.inf, math.inf)
    half = student(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def macro_average(intervals: Sequence[Interval]) -> Interval:
    """Unweighted mean over independent data sets, with an interval that follows from the sets' intervals (MOVER, Zou &
    Donner 2008, eq. 3). Raises ValueError without data sets."""
    if not intervals:
        raise ValueError("an average needs at least one data set")
    sets = len(intervals)
    value = sum(i.value for i in intervals) / sets
    below = math.hypot(*(i.value - i.low for i in intervals)) / sets
    above = math.hypot(*(i.high - i.value for i in intervals)) / sets
    # Without these bounds, rounding could make the interval over a single set wider than that set's own.
    low, high = (sum(ends) / sets for ends in zip(*((i.low, i.high) for i in intervals), strict=True))
    return Interval(value, max(low, value - below), min(high, value + above))


T975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1 to 10 degrees of freedom, where the series of `student` is not exact."""


def student(freedom: int) -> float:
    """97.5 % quantile of Student's t: from a table for few degrees of freedom, else by Abramowitz & Stegun 26.7.5.

    The series is cut after its first four terms.
    """
    if freedom < len(T975):
        return T975[freedom]
    z = Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _wilson(p: float, size: float) -> Interval:
    """The 95 % interval of Wilson (1927): the proportions that a score test with `size` independent draws does not
    reject."""
    z2 = Z95 * Z95 / size
    centre = (p + z2 / 2.0) / (1.0 + z2)
    half = Z95 * math.sqrt(p * (1.0 - p) / size + z2 / (4.0 * size)) / (1.0 + z2)
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


@dataclass(frozen=True, slots=True)
class SetFigures:
    """The result of an evaluation on one held-out set."""

    mean: Interval
    problems: int
    samples: int
    """Responses per problem."""


def figures_of(measure: Measure, sets: Mapping[str, SetFigures]) -> dict[str, float]:
    """The metrics of an evaluation, as observe/metrics.py names them; infinite ends of intervals are left out."""
    means = {name: figures.mean for name, figures in sets.items()}
    row: dict[str, float] = {}
    for name, mean in {**means, MEAN: macro_average(list(means.values()))}.items():
        row[f"{measure}/{name}"] = mean.value
        ends = {f"low/{name}": mean.low, f"high/{name}": mean.high}
        row |= {metric: value for metric, value in ends.items() if math.isfinite(value)}
    for name, figures in sets.items():
        row |= {f"problems/{name}": figures.problems, f"samples/{name}": figures.samples}
    return row
