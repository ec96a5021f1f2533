"""What the probes of a run's stages say of each followed response: ratios, triggers and dropped tokens by age."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from mugrpo_megatron.algorithm.segments import make_segments, with_turns
from mugrpo_megatron.algorithm.veto import THRESHOLDS, initial_state, veto
from mugrpo_megatron.recipe.objective import ObjectiveSection
from mugrpo_megatron.report.curves import Series, Values, rounded
from mugrpo_megatron.report.details import Details
from mugrpo_megatron.samples import turns_in
from mugrpo_megatron.stages.probe import Probe, Probed

VETO_KEYS = ("name", "veto", "veto_reach", "trigger_ratio")
QUANTILES = ((0.99, "red"), (0.9, "orange"), (0.5, "blue"), (0.1, "teal"), (0.01, "violet"))
AXIS = "probe"


@dataclass(frozen=True, slots=True)
class Followed:
    """One response of a stage at every age at which it was scored: A ages, R tokens."""

    stage: int
    response: Probed
    ages: tuple[int, ...]
    log_ratio: np.ndarray
    """float32 [A, R]: log of the learner's over the behaviour probability."""
    early: int = 0
    """Updates before the stage's start at which it was sampled: 0 unless the stage was generated ahead."""

    @property
    def trained(self) -> np.ndarray:
        """bool [R]: the tokens that are trained on."""
        mask = self.response.mask
        return np.ones(len(self.response.tokens), dtype=bool) if mask is None else np.array(mask, dtype=bool)

    @property
    def staleness(self) -> tuple[int, ...]:
        """Updates since it was sampled, at each of the ages."""
        return tuple(self.early + age for age in self.ages)

    @property
    def negative(self) -> bool:
        return self.response.advantage < 0

    def at(self, stale: int) -> np.ndarray | None:
        """The trained tokens' log-ratios so many updates after they were sampled; None where not probed then."""
        return self.log_ratio[self.staleness.index(stale)][self.trained] if stale in self.staleness else None


def followed(
    details: Details, recipe: Mapping[str, Any], early: Mapping[int, int] = MappingProxyType({})
) -> list[Followed]:
    """Every followed response with a token to train on. Ratios are to what training divides by.

    `early`: stage -> updates before its start at which it was sampled, where there are any.

    With `rollout.behaviour = "learner"` those are the learner's logprobs at the stage's start, so ratios begin at 1.
    """
    by_learner = recipe.get("rollout", {}).get("behaviour") == "learner"
    responses = []
    for stage, probe in sorted(details.probes.items()):
        ages = tuple(sorted(probe.logprobs))
        for place, response in enumerate(probe.responses):
            if ages and response.tokens:
                base = probe.logprobs[ages[0]][place] if by_learner else response.engine_logprobs
                log_ratio = _rows(probe, ages, place) - base
                one = Followed(stage, response, ages, log_ratio, early.get(stage, 0))
                responses += [one] if one.trained.any() else []
    return responses


def _rows(probe: Probe, ages: tuple[int, ...], place: int) -> np.ndarray:
    return np.stack([probe.logprobs[age][place] for age in ages])


def objective_of(recipe: Mapping[str, Any]) -> ObjectiveSection:
    """The veto's settings of a run's recipe; the defaults where it has none that are understood."""
    table = recipe.get("objective", {})
    try:
        return ObjectiveSection.model_validate({key: table[key] for key in VETO_KEYS if key in table})
    except ValidationError:
        return ObjectiveSection()


def verdicts(one: Followed, objective: ObjectiveSection) -> tuple[np.ndarray, np.ndarray]:
    """Triggers and dropped tokens, bool [A, R] each, under the run's veto at each age."""
    inside, turns = one.trained, turns_in(one.trained)
    rows, tokens = len(one.log_ratio), int(inside.sum())
    segments = with_turns(make_segments(torch.full((rows,), tokens), torch.ones(rows)), [turns] * rows)
    log_ratio = torch.from_numpy(one.log_ratio[:, inside].reshape(-1))
    advantage = torch.full_like(log_ratio, one.response.advantage)
    start = initial_state(segments, objective)
    alone = objective.model_copy(update={"veto": "trigger"})
    marks = np.zeros((2, *one.log_ratio.shape), dtype=bool)
    for own, section in zip(marks, (alone, objective), strict=True):
        own[:, inside] = ~veto(log_ratio, advantage, segments, section, start).keep.reshape(rows, tokens).numpy()
    return marks[0], marks[1]


# ---------------------------------------------------------------- curves over age, of the negative responses


def ages_of_probes(responses: Sequence[Followed]) -> list[int]:
    """Every staleness at which some stage was probed: the points of the axis AXIS."""
    return sorted({stale for one in responses for stale in one.staleness})


def trigger_axes(responses: Sequence[Followed]) -> dict[str, list[int]]:
    """Axis of each threshold's points: the lengths of the responses in which it finds a trigger."""
    return {f"trigger_{name}": [length for length, _ in points] for name, points in _firsts(responses).items()}


def ratio_series(responses: Sequence[Followed]) -> Iterable[Series]:
    """Quantiles of the ratio over the tokens of negative responses, the same ones at every age."""
    for share, color in QUANTILES:
        yield Series(f"{100 * share:g} %", color, AXIS, _quantile(responses, share, lambda one, stale: True))


def trained_series(responses: Sequence[Followed]) -> Iterable[Series]:
    """The 10 % quantile of responses that the stage has trained on, and of those whose update is still to come."""

    def trained(one: Followed, stale: int) -> bool:
        return stale - one.early > one.response.update

    yield Series("trained on", "red", AXIS, _quantile(responses, 0.1, trained))
    yield Series("still to come", "blue", AXIS, _quantile(responses, 0.1, lambda one, stale: not trained(one, stale)))


def share_series(responses: Sequence[Followed]) -> Iterable[Series]:
    """The share of negative responses with a token below each threshold."""
    negative = [one for one in responses if one.negative]
    for place, name in enumerate(THRESHOLDS):
        values: Values = []
        for age in ages_of_probes(responses):
            lowest = [float(row.min()) for one in negative if (row := one.at(age)) is not None]
            below = sum(low < math.log(float(name)) for low in lowest)
            values.append(rounded(below / len(lowest)) if lowest else None)
        yield Series(name, f"ramp-{2 + place}", AXIS, values)


def first_series(responses: Sequence[Followed]) -> Iterable[Series]:
    """Where the first token below each threshold stands, against the response's length."""
    for place, (name, points) in enumerate(_firsts(responses).items()):
        yield Series(name, f"ramp-{2 + place}", f"trigger_{name}", [float(at) for _, at in points], draw="points")


def _quantile(responses: Sequence[Followed], share: float, counts: Callable[[Followed, int], bool]) -> Values:
    """A quantile of π/β at each age, over the tokens of negative responses that count there."""
    values: Values = []
    for age in ages_of_probes(responses):
        rows = [one.at(age) for one in responses if one.negative and counts(one, age)]
        tokens = [row for row in rows if row is not None]
        values.append(_ratio(float(np.quantile(np.concatenate(tokens), share))) if tokens else None)
    return values


def _firsts(responses: Sequence[Followed]) -> dict[str, list[tuple[int, int]]]:
    """Threshold -> (length, position of the first token below it) of each negative response that has one, by length."""
    firsts: dict[str, list[tuple[int, int]]] = {}
    for name in THRESHOLDS:
        points = [
            (len(one.response.tokens), int(below.argmax()))
            for one in responses
            if one.negative and (below := one.trained & (one.log_ratio[-1] < math.log(float(name)))).any()
        ]
        if points:
            firsts[name] = sorted(points)
    return firsts


def _ratio(log_ratio: float) -> float:
    return rounded(math.exp(max(min(log_ratio, 50.0), -50.0)))
