"""Writes and reads the figures of an evaluation row: each held-out set's and their mean. Defines their names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mugrpo_megatron.evaluation.estimators import Interval, Measure, macro_average
from mugrpo_megatron.recipe.scoring import MEAN

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SetFigures:
    """The result of an evaluation on one held-out set."""

    mean: Interval
    problems: int
    samples: int
    """Responses per problem."""


def figures_of(measure: Measure, sets: Mapping[str, SetFigures]) -> dict[str, float]:
    """The metrics of an evaluation row, without infinite ends of intervals."""
    means = {name: figures.mean for name, figures in sets.items()}
    row: dict[str, float] = {}
    for name, mean in {**means, MEAN: macro_average(list(means.values()))}.items():
        row[f"{measure}/{name}"] = mean.value
        row |= {f"{end}/{name}": at for end, at in (("low", mean.low), ("high", mean.high)) if math.isfinite(at)}
    for name, figures in sets.items():
        row |= {f"problems/{name}": figures.problems, f"samples/{name}": figures.samples}
    return row


def measure_in(rows: Iterable[Row]) -> Measure:
    """What the rows' figures are means of; `accuracy` without rows."""
    return "reward" if any(f"reward/{MEAN}" in row for row in rows) else "accuracy"


def sets_in(rows: Iterable[Row]) -> list[str]:
    """The held-out sets of the rows, in their order, without the mean."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [name for base, _, name in (key.partition("/") for key in keys) if base == "problems" and name]


def value_in(row: Row, name: str = MEAN) -> float | None:
    """A set's figure, or the mean's; None if the row has none."""
    found = row.get(f"{measure_in([row])}/{name}")
    return None if found is None else float(found)


def interval_in(row: Row, name: str = MEAN) -> list[float] | None:
    """[low, high] of a set's 95 % interval, or of the mean's; None unless both ends are finite."""
    low, high = row.get(f"low/{name}"), row.get(f"high/{name}")
    return None if low is None or high is None else [float(low), float(high)]


def problems_in(row: Row) -> int:
    """Number of held-out problems, over all sets."""
    return sum(int(row[f"problems/{name}"]) for name in sets_in([row]))


def shown(value: float | None, measure: str) -> str:
    """A held-out figure as text: accuracy in percent, mean reward as a number."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if measure == "accuracy" else f"{value:.4g}"


def difference(gain: float, measure: str) -> str:
    """A gain as text: accuracy in points, mean reward as a number."""
    return f"{100 * gain:+.1f} points" if measure == "accuracy" else f"{gain:+.4g}"


def between(interval: Sequence[float] | None, measure: str) -> str:
    """An interval as text; empty for None."""
    if interval is None:
        return ""
    low, high = (shown(end, measure).removesuffix(" %") for end in interval)
    return f"{low} to {high}{' %' if measure == 'accuracy' else ''}"
