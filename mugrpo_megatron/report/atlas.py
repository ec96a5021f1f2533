"""The staleness atlas: how the probed responses of all stages grow stale, as charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mugrpo_megatron.algorithm.veto import THRESHOLDS
from mugrpo_megatron.report.curves import Chart, Series, Values, rounded
from mugrpo_megatron.report.probes import Followed

QUANTILES = ((0.99, "red"), (0.9, "orange"), (0.5, "blue"), (0.1, "teal"), (0.01, "violet"))
AXIS = "probe"


def atlas_ages(all_followed: Sequence[Followed]) -> list[int]:
    """Every staleness at which some stage was probed, its age but for prefetched ones: the points of the axis AXIS."""
    return sorted({stale for one in all_followed for stale in one.staleness})


def trigger_axes(all_followed: Sequence[Followed]) -> dict[str, list[int]]:
    """Axis of each threshold's points: the lengths of the responses in which it finds a trigger."""
    return {f"trigger_{name}": [length for length, _ in points] for name, points in _firsts(all_followed).items()}


def atlas_charts(all_followed: Sequence[Followed], trigger_ratio: float | None) -> Iterable[Chart]:
    """Charts of the negative responses, those that the veto acts on; none without any."""
    negative = [one for one in all_followed if one.negative]
    if not negative:
        return
    ages = atlas_ages(all_followed)
    stages = len({one.stage for one in negative})
    of = f"{len(negative)} negative responses of {stages} stage{'s' if stages > 1 else ''}"
    yield Chart(
        "atlas_ratio",
        "Ratio by age",
        f"Quantiles of π/β over the tokens of {of}, the same ones at every age.",
        [Series(f"{100 * share:g} %", color, AXIS, _quantile(negative, ages, share)) for share, color in QUANTILES],
        scale="log",
        along="age",
        rule=trigger_ratio or None,
        rule_label="trigger_ratio",
        unit="π/β",
    )
    yield Chart(
        "atlas_trained",
        "Before and after training on it",
        "10 % quantile of π/β over tokens of responses on which the stage has trained already, and of those whose "
        "update is still to come: what the objective pushed down itself, and what moved with it.",
        [
            Series("trained on", "red", AXIS, _low_where(negative, ages, _trained_on)),
            Series(
                "still to come",
                "blue",
                AXIS,
                _low_where(negative, ages, lambda one, stale: not _trained_on(one, stale)),
            ),
        ],
        scale="log",
        along="age",
        rule=1.0,
        rule_label="on policy",
        unit="π/β",
    )
    yield Chart(
        "atlas_triggers",
        "Responses with a trigger by threshold",
        f"Share of {of} with a token below each threshold.",
        [
            Series(name, f"ramp-{2 + place}", AXIS, _share_below(negative, ages, float(name)))
            for place, name in enumerate(THRESHOLDS)
        ],
        format="percent",
        zero=True,
        along="age",
    )
    yield Chart(
        "atlas_first",
        "First trigger against length",
        "Position of the first token below each threshold, at each stage's last probe, against the response's length.",
        [
            Series(name, f"ramp-{2 + place}", f"trigger_{name}", [float(at) for _, at in points], draw="points")
            for place, (name, points) in enumerate(_firsts(all_followed).items())
        ],
        zero=True,
        along="length",
        unit="token",
    )


def _trained_on(one: Followed, stale: int) -> bool:
    return stale - one.early > one.response.update


def _at(one: Followed, stale: int) -> np.ndarray | None:
    return one.log_ratio[one.staleness.index(stale)] if stale in one.staleness else None


def _tokens(several: Iterable[Followed], age: int) -> np.ndarray:
    rows = [row for one in several if (row := _at(one, age)) is not None]
    return np.concatenate(rows) if rows else np.empty(0)


def _quantile(several: Sequence[Followed], ages: Sequence[int], share: float) -> Values:
    found = [_tokens(several, age) for age in ages]
    return [_ratio(float(np.quantile(tokens, share))) if len(tokens) else None for tokens in found]


def _low_where(several: Sequence[Followed], ages: Sequence[int], holds: Callable[[Followed, int], bool]) -> Values:
    found = [_tokens((one for one in several if holds(one, age)), age) for age in ages]
    return [_ratio(float(np.quantile(tokens, 0.1))) if len(tokens) else None for tokens in found]


def _share_below(several: Sequence[Followed], ages: Sequence[int], threshold: float) -> Values:
    values: Values = []
    for age in ages:
        lowest = [float(row.min()) for one in several if (row := _at(one, age)) is not None]
        values.append(rounded(sum(low < math.log(threshold) for low in lowest) / len(lowest)) if lowest else None)
    return values


def _firsts(all_followed: Sequence[Followed]) -> dict[str, list[tuple[int, int]]]:
    """Threshold -> (length, position of the first token below it) of each negative response that has one, by length."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name in THRESHOLDS:
        points = [
            (len(one.response.tokens), int(below.argmax()))
            for one in all_followed
            if one.negative and (below := one.log_ratio[-1] < math.log(float(name))).any()
        ]
        if points:
            found[name] = sorted(points)
    return found


def _ratio(log_ratio: float) -> float:
    return rounded(math.exp(max(min(log_ratio, 50.0), -50.0)))
