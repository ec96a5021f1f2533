"""Curves of the stages' responses themselves: histograms of rewards and lengths, and pass@k."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mugrpo_megatron.evaluation.estimators import pass_at_k
from mugrpo_megatron.report.curves import Series, Values, ramp, rounded
from mugrpo_megatron.report.details import StageResponses

Stages = Mapping[int, StageResponses]

BINS = 24
FEW_VALUES = 8
"""With at most so many different rewards each has a bar of its own."""


def axes_of(stages: Stages) -> dict[str, list[float]]:
    """Positions of the histograms' points: a reward's own place or a bin's left edge."""
    return {"reward": reward_places(stages), "length": _edges(0.0, longest(stages))[:-1]} if stages else {}


def reward_places(stages: Stages) -> list[float]:
    """The rewards that occur, if they are few, else the left edges of equal bins."""
    values = np.unique(np.concatenate([stage.rewards for stage in stages.values()]))
    return values.tolist() if len(values) <= FEW_VALUES else _edges(float(values[0]), float(values[-1]))[:-1]


def reward_span(stages: Stages) -> tuple[float, float]:
    """From where to where the rewards' axis goes: of bars, half a bar beyond the first and the last."""
    if not stages:
        return 0.0, 1.0
    places = reward_places(stages)
    if len(places) > FEW_VALUES:
        ends = [(float(stage.rewards.min()), float(stage.rewards.max())) for stage in stages.values()]
        return min(low for low, _ in ends), max(high for _, high in ends)
    step = min(np.diff(places), default=1.0)
    return places[0] - 0.6 * step, places[-1] + 0.6 * step


def longest(stages: Stages) -> float:
    """One token more than the longest response has."""
    return max((float(stage.lengths.max(initial=1)) for stage in stages.values()), default=0.0) + 1.0


def reward_series(stages: Stages) -> Iterable[Series]:
    """The share of each stage's responses by reward."""
    places = reward_places(stages) if stages else []
    few = len(places) <= FEW_VALUES
    for label, color, stage in _curves(stages):
        yield Series(label, color, "reward", _shares(stage.rewards, places, few), draw="bars" if few else "step")


def length_series(stages: Stages) -> Iterable[Series]:
    """The share of each stage's responses by length."""
    edges = _edges(0.0, longest(stages))[:-1]
    for label, color, stage in _curves(stages):
        yield Series(label, color, "length", _shares(stage.lengths, edges, few=False), draw="step")


def pass_series(stages: Stages, drawn: Sequence[int]) -> Iterable[Series]:
    """pass@k of the training groups at k = 1, 2, 4, ..., for the stages `drawn` on the page's axis `stage`."""
    most = max((int(np.bincount(stage.groups).max()) for stage in stages.values()), default=0)
    for power in range(most.bit_length()):
        values = [_pass(stages[number], 2**power) if number in stages else None for number in drawn]
        yield Series(f"k = {2**power}", f"ramp-{min(1 + 2 * power, 7)}", "stage", values, draw="step")


def _curves(stages: Stages) -> Iterable[tuple[str, str, StageResponses]]:
    for place, (number, stage) in enumerate(sorted(stages.items())):
        yield f"stage {number}", ramp(place, len(stages)), stage


def _pass(stage: StageResponses, k: int) -> float | None:
    groups, inverse = np.unique(stage.groups, return_inverse=True)
    sizes, right = np.bincount(inverse), np.bincount(inverse, stage.verdicts >= 1.0)
    if not len(groups) or sizes.min() < k:
        return None
    pairs = [(int(n), int(c)) for n, c in zip(sizes, right, strict=True)]
    chance = {pair: pass_at_k(*pair, k) for pair in set(pairs)}
    return rounded(sum(chance[pair] for pair in pairs) / len(pairs))


def _shares(values: np.ndarray, places: Sequence[float], few: bool) -> Values:
    """Share of the values at each place, or from each place to the next."""
    at = np.searchsorted(places, values, side="left" if few else "right") - (0 if few else 1)
    counts = np.bincount(np.clip(at, 0, len(places) - 1), minlength=len(places))
    return [rounded(float(count) / max(len(values), 1)) for count in counts]


def _edges(low: float, high: float) -> list[float]:
    return [rounded(low + part * (high - low) / BINS) for part in range(BINS + 1)]
