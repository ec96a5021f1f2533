"""What runs have reached after equal time: means of held-out curves over their last quarter, and their differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mugrpo_megatron.observe.results import interval_in, value_in
from mugrpo_megatron.observe.rundata import RunData, paper_seconds

QUARTER = 0.75
"""A run's result is the mean of its curve from this share of the run to its end; one evaluation is too uncertain."""
NORMAL_95 = 1.959964
"""Half the width of a 95 % interval, in standard errors."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out figures of a run over the updates, or over the seconds, that it had spent at each evaluation."""

    spent: np.ndarray
    """float [n], ascending: updates, or seconds."""
    figures: np.ndarray
    """float [n]: accuracies as shares, or mean rewards."""
    errors: np.ndarray
    """float [n]: standard error of each figure over the problems; nan where the evaluation has no interval."""

    @property
    def end(self) -> float:
        return float(self.spent[-1])


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    error: float
    """Standard error over the held-out problems alone, nan without intervals; another seed's run differs by more."""

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval."""
        return NORMAL_95 * self.error


def over_updates(run: RunData) -> Curve:
    """The run's figures (mean over its held-out sets) over the updates taken. Raises ValueError without evaluations."""
    return _curve(run, lambda row: float(row["update"]))


def over_seconds(run: RunData) -> Curve:
    """The run's figures over the seconds that it had spent. The seconds of evaluations and saves do not count, since
    their number is the user's choice. Raises ValueError without evaluations."""
    return _curve(run, lambda row: seconds_until(run.phases, row["time"]))


def seconds_until(phases: Sequence[Mapping[str, Any]], time: float) -> float:
    """Seconds that a run spent until a Unix time, without evaluations and saves: T_total of `paper_seconds`.

    A phase that had not ended by then counts up to that time.
    """
    begun = [{**row, "end": min(row["end"], time)} for row in phases if row["start"] < time]
    return paper_seconds(begun)["T_total"]


def _curve(run: RunData, spent: Callable[[Mapping[str, Any]], float]) -> Curve:
    points: dict[float, tuple[float, float]] = {}
    for row in run.evals:
        value, interval = value_in(row), interval_in(row)
        if value is not None:
            error = (interval[1] - interval[0]) / (2 * NORMAL_95) if interval else math.nan
            points[spent(row)] = value, error  # of two evaluations at the same update or second the later one counts
    if not points:
        raise ValueError(f"{run.path} has no evaluation")
    x = sorted(points)
    return Curve(np.array(x), np.array([points[at][0] for at in x]), np.array([points[at][1] for at in x]))


def reached(curve: Curve, end: float) -> Estimate:
    """The result of a run of length `end`: the mean of the curve, linearly interpolated, over [3/4 end, end].

    `end` may be shorter than the run: with a constant learning rate the beginning of a curve is the curve of a shorter
    run. Raises ValueError when the curve does not cover the interval.
    """
    return _sum_of([(curve, weights_of_mean(curve.spent, end))])


def difference(curve: Curve, end: float, other: Curve, other_end: float) -> Estimate:
    """`reached(curve, end)` minus `reached(other, other_end)`; `curve` and `other` may be the same.

    The standard error is computed as if all evaluations were independent. Evaluations on the same problems are not:
    what the choice of problems adds to both results cancels in the difference, so the true error is smaller.
    """
    left, right = weights_of_mean(curve.spent, end), weights_of_mean(other.spent, other_end)
    if curve is other:
        return _sum_of([(curve, left - right)])
    return _sum_of([(curve, left), (other, -right)])


def weights_of_mean(spent: np.ndarray, end: float) -> np.ndarray:
    """The weights, float [n], of a curve's n figures in its mean over [3/4 end, end] (see `reached`).

    `spent` [n] are the points of the curve. Raises ValueError when they do not cover the interval.
    """
    begin = QUARTER * end
    if not spent[0] <= begin < end <= spent[-1]:
        raise ValueError(f"evaluations from {spent[0]:g} to {spent[-1]:g} do not cover {begin:g} to {end:g}")
    inner = spent[(spent > begin) & (spent < end)]
    x = np.array([begin, *inner, end])
    # The mean of a straight piece is the mean of its two ends. Each end is interpolated between two of the points.
    pieces = np.diff(x) / (end - begin)
    ends = np.concatenate([[0.0], pieces]) / 2 + np.concatenate([pieces, [0.0]]) / 2
    weights = np.zeros(len(spent))
    for at, weight in zip(x, ends, strict=True):
        right = min(int(np.searchsorted(spent, at, side="right")), len(spent) - 1)
        left = right - 1
        share = (at - spent[left]) / (spent[right] - spent[left])
        weights[left] += weight * (1 - share)
        weights[right] += weight * share
    return weights


def _sum_of(terms: Sequence[tuple[Curve, np.ndarray]]) -> Estimate:
    value = sum(float(weights @ curve.figures) for curve, weights in terms)
    variance = sum(float(((weights * curve.errors)[weights != 0] ** 2).sum()) for curve, weights in terms)
    return Estimate(value, math.sqrt(variance))
