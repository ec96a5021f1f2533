"""The same run, all its updates, cut into other stages: what GRPO's many switches cost against mu-GRPO's few.

Only the schedule changes: the objective, and so the cost of an update, stays the recipe's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mugrpo_megatron.plan.case import Case
from mugrpo_megatron.plan.generating import decoding_seconds
from mugrpo_megatron.plan.memory import Memory
from mugrpo_megatron.plan.timing import phases, stage_bytes

GRPO_UPDATES = 4
"""µ of ordinary GRPO in the paper's comparison."""
MU_GRPO_STAGES = 4
"""S of mu-GRPO there."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run's whole cost under one cut."""

    name: str
    stages: int
    updates_per_stage: int
    seconds: Mapping[str, float]
    """Phase -> seconds over the whole run."""
    tail: float
    """Of `generate`: seconds beyond what one single stage would have taken; the wait for the longest responses."""
    stage_bytes: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def schedules(case: Case, need: Memory) -> list[Schedule]:
    """The recipe's own cut, then GRPO's and mu-GRPO's schedules, over the same updates, evaluated equally often."""
    own = case.recipe.schedule
    updates = own.stages * own.updates_per_stage
    cuts = {
        "this recipe": (own.stages, own.updates_per_stage),
        "GRPO's": (-(-updates // GRPO_UPDATES), min(GRPO_UPDATES, updates)),
        "mu-GRPO's": (min(MU_GRPO_STAGES, updates), -(-updates // MU_GRPO_STAGES)),
    }
    evaluate = own.stages * phases(case, need).evaluate
    in_one_stage = decoding_seconds(updates * case.responses, case, need.serving)
    found = []
    for name, (stages, per_stage) in cuts.items():
        cut = _cut(case, stages, per_stage)
        seconds = {phase: stages * value for phase, value in asdict(phases(cut, need)).items()}
        seconds["evaluate"] = evaluate
        tail = max(0.0, seconds["generate"] - in_one_stage)
        found.append(Schedule(name, stages, per_stage, seconds, tail, stage_bytes(cut)))
    return found


def _cut(case: Case, stages: int, updates_per_stage: int) -> Case:
    schedule = case.recipe.schedule.model_copy(update={"stages": stages, "updates_per_stage": updates_per_stage})
    return case.with_recipe(case.recipe.model_copy(update={"schedule": schedule}))
