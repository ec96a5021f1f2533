"""Charts and curves as data, computed from a run's rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mugrpo_megatron.observe.log import Row

Values = list[float | None]
Draw = Literal["line", "dots", "step", "points", "bars"]
Along = Literal["run", "age", "length", "reward"]
Format = Literal["percent", "number", "tokens"]


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
    """A band around the curve."""
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
    format: Format = "number"
    scale: Literal["linear", "log"] = "linear"
    zero: bool = False
    """The vertical axis starts at 0; a log axis is linear between 0 and its smallest value."""
    along: Along = "run"
    """The abscissa: updates or wall-clock, as the reader chooses, or one of its own."""
    rule: float | None = None
    """A dashed reference line at this height."""
    rule_label: str = ""
    rule_in_view: bool = False
    """The vertical axis includes `rule`, even if the curves are far from it."""
    unit: str = ""
    """Of the vertical axis, where its numbers do not show it."""
    wide: bool = False
    """As wide as the page."""


def over_updates(
    buckets: Sequence[Sequence[Row]],
    label: str,
    color: str,
    metric: str,
    *,
    axis: str = "update",
    smooth: bool = False,
    restarts: bool = False,
    bold: bool = False,
    reduce: Callable[[Sequence[float]], float] = statistics.fmean,
) -> Series:
    """A metric's curve along `axis`, one point for each bucket of updates; None where no update has a value."""
    found = [[value for row in rows if (value := row.get(metric)) is not None] for rows in buckets]
    values = [rounded(reduce(values)) if values else None for values in found]
    return Series(label, color, axis, values, smooth=smooth, restarts=restarts, bold=bold)


MAX_AGES = 256
"""With longer stages than this, a point of a curve over age stands for several ages."""


def ages_of(updates: Iterable[Row]) -> range:
    """The first age of each point of the axis `age`: that of the data, in updates."""
    count = 1 + max((staleness(row) for row in updates), default=0)
    return range(0, count, -(-count // MAX_AGES))


def by_age(updates: Iterable[Row], ages: range) -> list[list[Row]]:
    """The updates that each point of `ages` stands for, over all stages."""
    found: list[list[Row]] = [[] for _ in ages]
    for row in updates:
        found[staleness(row) // ages.step].append(row)
    return found


def staleness(update: Row) -> int:
    """Updates since the update's responses were sampled; a log of before the metric has the same in `age`."""
    found = update.get("staleness")
    return int(update["age"] if found is None else found)


def sampled_early(updates: Iterable[Row]) -> dict[int, int]:
    """Stage -> updates before its start at which its responses were sampled (`schedule.max_sample_age`)."""
    return {row["stage"]: staleness(row) - row["age"] for row in updates}


def column(rows: Iterable[Row], metric: str) -> Values:
    """A metric's value in each row; None where a row has no value."""
    return [None if (value := row.get(metric)) is None else rounded(value) for row in rows]


def rounded(value: float) -> float:
    """Rounded to six significant digits, which is enough for a screen and a third of the bytes."""
    return float(f"{value:.6g}")


def has_values(values: Values) -> bool:
    return any(value is not None for value in values)


def within_unit(values: Values) -> bool:
    return all(value is None or 0 <= value <= 1 for value in values)


def spread(values: Values) -> float:
    """Largest over median of the positive values; 1 without any."""
    positive = [value for value in values if value is not None and value > 0]
    return max(positive) / statistics.median(positive) if positive else 1.0
