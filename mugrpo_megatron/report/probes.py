"""What the probes of a run's stages say of each followed response: ratios, triggers and dropped tokens by age."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from mugrpo_megatron.algorithm.segments import make_segments
from mugrpo_megatron.algorithm.veto import initial_state, veto
from mugrpo_megatron.recipe.objective import ObjectiveSection
from mugrpo_megatron.report.details import Details
from mugrpo_megatron.stages.probe import Probe, Probed

VETO_KEYS = ("name", "veto", "trigger", "trigger_ratio")


@dataclass(frozen=True, slots=True)
class Followed:
    """One response of a stage at every age at which it was scored: A ages, R tokens."""

    stage: int
    response: Probed
    ages: tuple[int, ...]
    log_ratio: np.ndarray
    """float32 [A, R]: log of the learner's over the behaviour probability."""
    early: int = 0
    """Updates before the stage's start at which it was sampled: `schedule.max_sample_age`."""

    @property
    def staleness(self) -> tuple[int, ...]:
        """Updates since it was sampled, at each of the ages."""
        return tuple(self.early + age for age in self.ages)

    @property
    def negative(self) -> bool:
        return self.response.advantage < 0


def followed(
    details: Details, recipe: Mapping[str, Any], early: Mapping[int, int] = MappingProxyType({})
) -> list[Followed]:
    """Every followed response with a token. Ratios are to what training divides by.

    `early`: stage -> updates before its start at which it was sampled, where there are any.

    With `rollout.behaviour = "learner"` those are the learner's logprobs at the stage's start, so ratios begin at 1.
    """
    own = recipe.get("rollout", {}).get("behaviour") == "learner"
    found = []
    for stage, probe in sorted(details.probes.items()):
        ages = tuple(sorted(probe.logprobs))
        for place, response in enumerate(probe.responses):
            if ages and response.tokens:
                base = probe.logprobs[ages[0]][place] if own else response.behaviour_logprobs
                found.append(Followed(stage, response, ages, _rows(probe, ages, place) - base, early.get(stage, 0)))
    return found


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
    rows, tokens = one.log_ratio.shape
    segments = make_segments(torch.full((rows,), tokens), torch.ones(rows))
    log_ratio = torch.from_numpy(one.log_ratio.reshape(-1))
    advantage = torch.full_like(log_ratio, one.response.advantage)
    start = initial_state(segments)
    dropped = ~veto(log_ratio, advantage, segments, objective, start).keep
    alone = objective.model_copy(update={"veto": "trigger"})
    triggers = ~veto(log_ratio, advantage, segments, alone, start).keep
    return triggers.reshape(rows, tokens).numpy(), dropped.reshape(rows, tokens).numpy()
