"""Computes ratios, triggers and dropped tokens of probed responses at each age, and their curves.

A response is probed if its log-probabilities were computed at several ages of its stage. An age is a number of updates
taken on the stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from mugrpo_megatron.stages.probe import ProbeRow

VETO_KEYS = ("name", "veto", "veto_reach", "trigger_ratio")
QUANTILES = ((0.99, "red"), (0.9, "orange"), (0.5, "blue"), (0.1, "teal"), (0.01, "violet"))
AXIS = "probe"


@dataclass(frozen=True, slots=True)
class ProbedResponse:
    """One response and its log-ratios at each age at which its stage was probed: A ages, R tokens."""

    stage: int
    probe: ProbeRow
    ages: tuple[int, ...]
    log_ratio: np.ndarray
    """float32 [A, R]: log-probability under the learner at that age, minus that under the behaviour policy."""

    @property
    def trained(self) -> np.ndarray:
        """bool [R]: whether each token is trained on."""
        mask = self.probe.mask
        return np.ones(len(self.probe.tokens), dtype=bool) if mask is None else np.array(mask, dtype=bool)

    @property
    def negative(self) -> bool:
        return self.probe.advantage < 0

    def at(self, age: int) -> np.ndarray | None:
        """float32: log-ratios of the trained tokens at an age; None if the response was not probed at that age."""
        return self.log_ratio[self.ages.index(age)][self.trained] if age in self.ages else None


def probed_responses(details: Details, recipe: Mapping[str, Any]) -> list[ProbedResponse]:
    """The probed responses that have a token to train on, with log-ratios against the behaviour policy of training.

    With `rollout.behaviour = "learner"` that policy is the learner at the stage's start, so ratios begin at 1.
    """
    by_learner = recipe.get("rollout", {}).get("behaviour") == "learner"
    responses = []
    for stage, probe in sorted(details.probes.items()):
        ages = tuple(sorted(probe.logprobs))
        for index, response in enumerate(probe.responses):
            if ages and response.tokens:
                base = probe.logprobs[ages[0]][index] if by_learner else response.engine_logprobs
                log_ratio = np.stack([probe.logprobs[age][index] for age in ages]) - base
                probed = ProbedResponse(stage, response, ages, log_ratio)
                responses += [probed] if probed.trained.any() else []
    return responses


def objective_of(recipe: Mapping[str, Any]) -> ObjectiveSection:
    """The veto's settings in a run's recipe; the defaults if they are missing or not valid."""
    table = recipe.get("objective", {})
    try:
        return ObjectiveSection.model_validate({key: table[key] for key in VETO_KEYS if key in table})
    except ValidationError:
        return ObjectiveSection()


def veto_masks(response: ProbedResponse, objective: ObjectiveSection) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are triggers at each age, and which the run's veto marks (`KeepMask.marked`): bool [A, R] each."""
    inside, turns = response.trained, turns_in(response.trained)
    rows, tokens = len(response.log_ratio), int(inside.sum())
    segments = with_turns(make_segments(torch.full((rows,), tokens), torch.ones(rows)), [turns] * rows)
    log_ratio = torch.from_numpy(response.log_ratio[:, inside].reshape(-1))
    advantage = torch.full_like(log_ratio, response.probe.advantage)
    start = initial_state(segments, objective)
    alone = objective.model_copy(update={"veto": "trigger"})
    marks = np.zeros((2, *response.log_ratio.shape), dtype=bool)
    for mark, section in zip(marks, (alone, objective), strict=True):
        mark[:, inside] = veto(log_ratio, advantage, segments, section, start).marked.reshape(rows, tokens).numpy()
    return marks[0], marks[1]


# ---------------------------------------------------------------- curves over age, of the negative responses


def ages_of_probes(responses: Sequence[ProbedResponse]) -> list[int]:
    """The ages at which at least one stage was probed; they are the points of the axis AXIS."""
    return sorted({age for response in responses for age in response.ages})


def trigger_axes(responses: Sequence[ProbedResponse]) -> dict[str, list[int]]:
    """Axis `trigger_THRESHOLD` -> its points: the lengths of the negative responses that have a token below the
    threshold at the last probe."""
    return {f"trigger_{name}": [length for length, _ in points] for name, points in _firsts(responses).items()}


def ratio_series(responses: Sequence[ProbedResponse]) -> Iterable[Series]:
    """Curves over age: quantiles of the ratio, over the tokens of all negative responses."""
    for share, color in QUANTILES:
        yield Series(f"{100 * share:g} %", color, AXIS, _quantile(responses, share, lambda response, age: True))


def trained_series(responses: Sequence[ProbedResponse]) -> Iterable[Series]:
    """Two curves over age: the 10 % quantile of the ratio in negative responses on which the stage has trained by that
    age, and in those on which it has not."""

    def trained(response: ProbedResponse, age: int) -> bool:
        return age > response.probe.update

    yield Series("trained on", "red", AXIS, _quantile(responses, 0.1, trained))
    yield Series(
        "still to come", "blue", AXIS, _quantile(responses, 0.1, lambda response, age: not trained(response, age))
    )


def share_series(responses: Sequence[ProbedResponse]) -> Iterable[Series]:
    """Curves over age, one for each threshold: the share of negative responses with a token's ratio below it."""
    negative = [response for response in responses if response.negative]
    for index, name in enumerate(THRESHOLDS):
        values: Values = []
        for age in ages_of_probes(responses):
            lowest = [float(row.min()) for response in negative if (row := response.at(age)) is not None]
            below = sum(low < math.log(float(name)) for low in lowest)
            values.append(rounded(below / len(lowest)) if lowest else None)
        yield Series(name, f"ramp-{2 + index}", AXIS, values)


def first_series(responses: Sequence[ProbedResponse]) -> Iterable[Series]:
    """Points, for each threshold: the position of the first token below it in a negative response at the last probe,
    against the response's length."""
    for index, (name, points) in enumerate(_firsts(responses).items()):
        yield Series(name, f"ramp-{2 + index}", f"trigger_{name}", [float(at) for _, at in points], draw="points")


def _quantile(
    responses: Sequence[ProbedResponse], share: float, counts: Callable[[ProbedResponse, int], bool]
) -> Values:
    """The quantile `share` of π/β at each age, over the tokens of negative responses for which `counts` is true at the
    age."""
    values: Values = []
    for age in ages_of_probes(responses):
        rows = [response.at(age) for response in responses if response.negative and counts(response, age)]
        tokens = [row for row in rows if row is not None]
        quantile = float(np.quantile(np.concatenate(tokens), share)) if tokens else None
        values.append(None if quantile is None else rounded(math.exp(max(min(quantile, 50.0), -50.0))))
    return values


def _firsts(responses: Sequence[ProbedResponse]) -> dict[str, list[tuple[int, int]]]:
    """Threshold -> (length, position of the first token below it) of each negative response with such a token at the
    last probe, sorted by length. Thresholds without such a response are left out."""
    firsts: dict[str, list[tuple[int, int]]] = {}
    for name in THRESHOLDS:
        points = [
            (len(response.probe.tokens), int(below.argmax()))
            for response in responses
            if response.negative
            and (below := response.trained & (response.log_ratio[-1] < math.log(float(name)))).any()
        ]
        if points:
            firsts[name] = sorted(points)
    return firsts
