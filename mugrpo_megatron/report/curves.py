"""Charts and their curves as data, and functions that compute curves from a run's rows and its stages' responses."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mugrpo_megatron.evaluation.estimators import pass_at_k
from mugrpo_megatron.observe.metrics import Row, values_in
from mugrpo_megatron.observe.results import interval_in, measure_in, sets_in
from mugrpo_megatron.recipe.scoring import MEAN
from mugrpo_megatron.report.details import StageResponses

Values = list[float | None]
Stages = Mapping[int, StageResponses]
Draw = Literal["line", "dots", "step", "points", "bars"]

SET_COLORS = ("teal", "violet", "magenta", "yellow", "red", "grey", "ramp-2", "ramp-5")
"""Colours of held-out sets; their mean is blue, the training reward orange."""
BINS = 24
"""Bins of a histogram."""
FEW_VALUES = 8
"""Most different rewards for which a histogram has a bar for each reward; for more, rewards are put into bins."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: `y` has a value for each point of its horizontal axis `axis`, or None where there is none."""

    label: str
    color: str
    axis: str
    y: Values
    draw: Draw = "line"
    low: Values | None = None
    high: Values | None = None
    """The upper end of an interval around each value; `low` is the lower end."""
    smooth: bool = False
    """Whether the curve is noisy. Then it is drawn faintly, with its moving average on top."""
    restarts: bool = False
    """Whether the curve starts anew in every stage, so that no line connects one stage with the next."""
    bold: bool = False
    """Whether the curve is drawn thicker, as the most important of several."""


@dataclass(frozen=True, slots=True)
class Chart:
    id: str
    title: str
    explains: str
    series: list[Series]
    format: Literal["percent", "number", "tokens"] = "number"
    scale: Literal["linear", "log"] = "linear"
    zero: bool = False
    """Whether the vertical axis starts at 0. A logarithmic one is then linear from 0 to its smallest value."""
    along: Literal["run", "age", "length", "reward"] = "run"
    """The horizontal axis. `run` is updates or wall-clock time; the reader of the page chooses."""
    rule: float | None = None
    """The height of a dashed reference line; None for no line."""
    rule_label: str = ""
    unit: str = ""
    """Unit of the vertical axis, if its numbers do not show it."""
    wide: bool = False
    """Whether the chart takes the whole width of the page."""


def worst_or_mean(metric: str, values: Sequence[float]) -> float:
    """One value for several updates: of a p99, a maximum, a minimum or the ESS the worst, of other metrics the mean."""
    if metric.endswith(("_max", "_p99")):
        return max(values)
    return min(values) if metric.endswith("_min") or metric == "ess" else statistics.fmean(values)


def over_updates(buckets: Sequence[Sequence[Row]], metric: str) -> Values:
    """The values of a metric along the axis `update`, one for each bucket; None if no row in the bucket has the
    metric."""
    values = (values_in(rows, metric) for rows in buckets)
    return [rounded(worst_or_mean(metric, several)) if several else None for several in values]


MAX_AGES = 256
"""Most points of a curve over age; in a longer stage a point stands for several ages."""


def ages_of(updates: Iterable[Row]) -> range:
    """The axis `age`: the first age that each of its points stands for."""
    count = 1 + max((row["age"] for row in updates), default=0)
    return range(0, count, -(-count // MAX_AGES))


def by_age(updates: Iterable[Row], ages: range) -> list[list[Row]]:
    """For each point of the axis `ages`, the rows of the updates at the point's ages, of all stages."""
    buckets: list[list[Row]] = [[] for _ in ages]
    for row in updates:
        buckets[row["age"] // ages.step].append(row)
    return buckets


def column(rows: Iterable[Row], metric: str) -> Values:
    """A metric's value in each row; None for a row without the metric."""
    return [None if (value := row.get(metric)) is None else rounded(value) for row in rows]


def held_out(evals: Sequence[Row]) -> Iterable[Series]:
    """The curves of held-out results: for one set its curve with intervals; for several sets a curve for each without
    intervals, and their mean with intervals."""
    measure, names = measure_in(evals), sets_in(evals)
    if len(names) > 1:
        yield from each_set(evals, measure, "{set}")
        yield with_interval(evals, MEAN, measure, f"mean {measure}", "blue", "eval", bold=True)
    else:
        yield with_interval(evals, [*names, MEAN][0], measure, f"held-out {measure}", "blue", "eval")


def with_interval(
    evals: Sequence[Row], name: str, measure: str, label: str, color: str, axis: str, bold: bool = False
) -> Series:
    """The curve of a held-out set's results, or of the mean over sets, with its 95 % intervals."""
    ends = [interval_in(row, name) for row in evals]
    low, high = ([None if both is None else rounded(both[end]) for both in ends] for end in (0, 1))
    values = column(evals, f"{measure}/{name}")
    return Series(label, color, axis, values, draw="dots", low=low, high=high, bold=bold)


def each_set(evals: Sequence[Row], metric: str, label: str) -> Iterable[Series]:
    """A curve of a metric for each held-out set; `passed` (pass@k) only for sets with several responses to a problem.

    The curve is called `label`, in which `{set}` and `{samples}` are filled in.
    """
    for index, name in enumerate(sets_in(evals)):
        samples = next((row[f"samples/{name}"] for row in reversed(evals) if f"samples/{name}" in row), 1)
        if metric != "passed" or samples > 1:
            color = SET_COLORS[index % len(SET_COLORS)]
            text = label.format(set=name, samples=samples)
            yield Series(text, color, "eval", column(evals, f"{metric}/{name}"), draw="dots")


def ramp(index: int, count: int, first: int = 0) -> str:
    """The colour of the `index`-th of `count` ordered curves: from `ramp-FIRST`, the faintest, to `ramp-7`."""
    return f"ramp-{first + round((7 - first) * index / max(count - 1, 1))}"


def rounded(value: float) -> float:
    """The value with six significant digits, which are enough for a screen and take a third of the bytes."""
    return float(f"{value:.6g}")


def has_values(values: Values) -> bool:
    return any(value is not None for value in values)


def spread(values: Values) -> float:
    """The largest of the positive values divided by their median; 1 if there are none."""
    positive = [value for value in values if value is not None and value > 0]
    return max(positive) / statistics.median(positive) if positive else 1.0


def axes_of(stages: Stages) -> dict[str, list[float]]:
    """The axes of the histograms: name -> each bar's reward, or the left edge of each bin; empty without stages."""
    return {"reward": reward_places(stages), "length": _edges(0.0, longest(stages))[:-1]} if stages else {}


def reward_places(stages: Stages) -> list[float]:
    """The rewards that occur, if they are few; otherwise the left edges of equal bins."""
    values = np.unique(np.concatenate([stage.rewards for stage in stages.values()]))
    return values.tolist() if len(values) <= FEW_VALUES else _edges(float(values[0]), float(values[-1]))[:-1]


def reward_span(stages: Stages) -> tuple[float, float]:
    """The two ends of the axis of rewards.

    If each reward has a bar of its own, the axis goes beyond the first and the last reward by 0.6 of the smallest
    distance between rewards, so that their bars have room. Without stages it is from 0 to 1.
    """
    if not stages:
        return 0.0, 1.0
    places = reward_places(stages)
    if len(places) > FEW_VALUES:
        ends = [(float(stage.rewards.min()), float(stage.rewards.max())) for stage in stages.values()]
        return min(low for low, _ in ends), max(high for _, high in ends)
    step = min(np.diff(places), default=1.0)
    return places[0] - 0.6 * step, places[-1] + 0.6 * step


def longest(stages: Stages) -> float:
    """The end of the axis of lengths: one more than the tokens of the longest response."""
    return max((float(stage.lengths.max(initial=1)) for stage in stages.values()), default=0.0) + 1.0


def reward_series(stages: Stages) -> Iterable[Series]:
    """A histogram for each stage: the share of its responses with each reward, or in each bin of rewards."""
    places = reward_places(stages) if stages else []
    few = len(places) <= FEW_VALUES
    for label, color, stage in _curves(stages):
        yield Series(label, color, "reward", _shares(stage.rewards, places, few), draw="bars" if few else "step")


def length_series(stages: Stages) -> Iterable[Series]:
    """A histogram for each stage: the share of its responses in each of BINS bins of lengths."""
    edges = _edges(0.0, longest(stages))[:-1]
    for label, color, stage in _curves(stages):
        yield Series(label, color, "length", _shares(stage.lengths, edges, few=False), draw="step")


def pass_series(stages: Stages, drawn: Sequence[int]) -> Iterable[Series]:
    """Curves over the stages `drawn`, one for each k = 1, 2, 4, ...: pass@k of the training groups."""
    most = max((int(np.bincount(stage.groups).max()) for stage in stages.values()), default=0)
    for power in range(most.bit_length()):
        values = [_pass(stages[number], 2**power) if number in stages else None for number in drawn]
        yield Series(f"k = {2**power}", f"ramp-{min(1 + 2 * power, 7)}", "stage", values, draw="step")


def _curves(stages: Stages) -> Iterable[tuple[str, str, StageResponses]]:
    for index, (number, stage) in enumerate(sorted(stages.items())):
        yield f"stage {number}", ramp(index, len(stages)), stage


def _pass(stage: StageResponses, k: int) -> float | None:
    groups, inverse = np.unique(stage.groups, return_inverse=True)
    sizes, right = np.bincount(inverse), np.bincount(inverse, stage.verdicts >= 1.0)
    if not len(groups) or sizes.min() < k:
        return None
    pairs = [(int(n), int(c)) for n, c in zip(sizes, right, strict=True)]
    chance = {pair: pass_at_k(*pair, k) for pair in set(pairs)}
    return rounded(sum(chance[pair] for pair in pairs) / len(pairs))


def _shares(values: np.ndarray, places: Sequence[float], few: bool) -> Values:
    """The share of the values that equal each place (`few`), or that are in the bin that begins at each place."""
    at = np.searchsorted(places, values, side="left" if few else "right") - (0 if few else 1)
    counts = np.bincount(np.clip(at, 0, len(places) - 1), minlength=len(places))
    return [rounded(float(count) / max(len(values), 1)) for count in counts]


def _edges(low: float, high: float) -> list[float]:
    return [rounded(low + index * (high - low) / BINS) for index in range(BINS + 1)]
