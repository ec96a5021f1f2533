"""Charts and curves as data, and curves from a run's rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mugrpo_megatron.observe.metrics import Row, values_in
from mugrpo_megatron.observe.results import interval_in, measure_in, sets_in
from mugrpo_megatron.recipe.scoring import MEAN

Values = list[float | None]
Draw = Literal["line", "dots", "step", "points", "bars"]

SET_COLORS = ("teal", "violet", "magenta", "yellow", "red", "grey", "ramp-2", "ramp-5")
"""Colours of held-out sets; their mean is blue, the training reward orange."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve; `y` has a value for each point of the axis `axis`, None where there is no finite value."""

    label: str
    color: str
    axis: str
    y: Values
    draw: Draw = "line"
    low: Values | None = None
    high: Values | None = None
    """An interval around each value."""
    smooth: bool = False
    """Noisy: drawn faintly under its moving average."""
    restarts: bool = False
    """Starts again with every stage: no line connects one stage with the next."""
    bold: bool = False
    """The most important of several curves: drawn thicker."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel of the page."""

    id: str
    title: str
    explains: str
    series: list[Series]
    format: Literal["percent", "number", "tokens"] = "number"
    scale: Literal["linear", "log"] = "linear"
    zero: bool = False
    """The vertical axis starts at 0; a log axis is linear between 0 and its smallest value."""
    along: Literal["run", "age", "length", "reward"] = "run"
    """The abscissa: updates or wall-clock, as the reader chooses, or one of its own."""
    rule: float | None = None
    """A dashed reference line at this height."""
    rule_label: str = ""
    unit: str = ""
    """Of the vertical axis, where its numbers do not show it."""
    wide: bool = False
    """As wide as the page."""


def worst_or_mean(metric: str, values: Sequence[float]) -> float:
    """What stands for several updates: the worst value of a p99, max, min or ESS, the mean of anything else."""
    if metric.endswith(("_max", "_p99")):
        return max(values)
    return min(values) if metric.endswith("_min") or metric == "ess" else statistics.fmean(values)


def over_updates(buckets: Sequence[Sequence[Row]], metric: str) -> Values:
    """A metric with one value for each bucket of updates; None where no update has one."""
    values = (values_in(rows, metric) for rows in buckets)
    return [rounded(worst_or_mean(metric, several)) if several else None for several in values]


MAX_AGES = 256
"""With longer stages than this, a point of a curve over age stands for several ages."""


def ages_of(updates: Iterable[Row]) -> range:
    """The first age of each point of the axis `age`: that of the data, in updates."""
    count = 1 + max((staleness(row) for row in updates), default=0)
    return range(0, count, -(-count // MAX_AGES))


def by_age(updates: Iterable[Row], ages: range) -> list[list[Row]]:
    """The updates that each point of `ages` stands for, over all stages."""
    buckets: list[list[Row]] = [[] for _ in ages]
    for row in updates:
        buckets[staleness(row) // ages.step].append(row)
    return buckets


def staleness(update: Row) -> int:
    """Updates since the update's responses were sampled; a log of before the metric has the same in `age`."""
    value = update.get("staleness")
    return int(update["age"] if value is None else value)


def sampled_early(updates: Iterable[Row]) -> dict[int, int]:
    """Stage -> updates before its start at which its responses were sampled: 0 unless it was generated ahead."""
    return {row["stage"]: staleness(row) - row["age"] for row in updates}


def column(rows: Iterable[Row], metric: str) -> Values:
    """A metric's value in each row; None where a row has no value."""
    return [None if (value := row.get(metric)) is None else rounded(value) for row in rows]


def held_out(evals: Sequence[Row]) -> Iterable[Series]:
    """The only held-out set's curve, or each set's and their mean, with an interval at the last one."""
    measure, names = measure_in(evals), sets_in(evals)
    if len(names) > 1:
        yield from each_set(evals, measure, "{set}")
        yield with_interval(evals, MEAN, measure, f"mean {measure}", "blue", "eval", bold=True)
    else:
        yield with_interval(evals, [*names, MEAN][0], measure, f"held-out {measure}", "blue", "eval")


def with_interval(
    evals: Sequence[Row], name: str, measure: str, label: str, color: str, axis: str, bold: bool = False
) -> Series:
    """A held-out set's curve, or the mean's, with its intervals."""
    ends = [interval_in(row, name) for row in evals]
    low, high = ([None if both is None else rounded(both[end]) for both in ends] for end in (0, 1))
    values = column(evals, f"{measure}/{name}")
    return Series(label, color, axis, values, draw="dots", low=low, high=high, bold=bold)


def each_set(evals: Sequence[Row], metric: str, label: str) -> Iterable[Series]:
    """A metric of each held-out set; of pass@k, those with several responses a problem."""
    for place, name in enumerate(sets_in(evals)):
        samples = next((row[f"samples/{name}"] for row in reversed(evals) if f"samples/{name}" in row), 1)
        if metric != "passed" or samples > 1:
            color = SET_COLORS[place % len(SET_COLORS)]
            text = label.format(set=name, samples=samples)
            yield Series(text, color, "eval", column(evals, f"{metric}/{name}"), draw="dots")


def ramp(place: int, count: int, first: int = 0) -> str:
    """The colour of one of `count` ordered curves: from `ramp-first`, the faintest, to `ramp-7`."""
    return f"ramp-{first + round((7 - first) * place / max(count - 1, 1))}"


def rounded(value: float) -> float:
    """Rounded to six significant digits, which is enough for a screen and a third of the bytes."""
    return float(f"{value:.6g}")


def has_values(values: Values) -> bool:
    return any(value is not None for value in values)


def spread(values: Values) -> float:
    """Largest over median of the positive values; 1 without any."""
    positive = [value for value in values if value is not None and value > 0]
    return max(positive) / statistics.median(positive) if positive else 1.0
