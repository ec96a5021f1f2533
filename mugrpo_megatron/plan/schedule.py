"""The same run, all its updates, cut into other stages: what GRPO's many switches cost against mu-GRPO's few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mugrpo_megatron.plan.cluster import Assumptions, Cluster
from mugrpo_megatron.plan.layout import Layout
from mugrpo_megatron.plan.memory import Memory
from mugrpo_megatron.plan.timing import phases, stage_bytes
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture

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
    """Of `generate`: seconds beyond what full engines would have taken; the wait for the longest responses."""
    stage_bytes: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def schedules(
    recipe: Recipe,
    architecture: Architecture,
    config: Mapping,
    layout: Layout,
    cluster: Cluster,
    guess: Assumptions,
    need: Memory,
) -> list[Schedule]:
    """The recipe's own cut, GRPO's and mu-GRPO's, over the same updates, evaluated equally often."""
    updates = recipe.schedule.stages * recipe.schedule.updates_per_stage
    cuts = {
        "this recipe": (recipe.schedule.stages, recipe.schedule.updates_per_stage),
        "GRPO": (-(-updates // GRPO_UPDATES), min(GRPO_UPDATES, updates)),
        "mu-GRPO": (min(MU_GRPO_STAGES, updates), -(-updates // MU_GRPO_STAGES)),
    }
    everything = phases(_cut(recipe, 1, updates), architecture, config, layout, cluster, guess, need).generate
    found = []
    for name, (stages, per_stage) in cuts.items():
        cut = _cut(recipe, stages, per_stage)
        one = phases(cut, architecture, config, layout, cluster, guess, need)
        seconds = {phase: stages * value for phase, value in asdict(one).items()}
        own = phases(recipe, architecture, config, layout, cluster, guess, need)
        seconds["evaluate"] = recipe.schedule.stages * own.evaluate
        found.append(
            Schedule(
                name, stages, per_stage, seconds, max(0.0, seconds["generate"] - everything), stage_bytes(cut, guess)
            )
        )
    return found


def _cut(recipe: Recipe, stages: int, updates_per_stage: int) -> Recipe:
    schedule = recipe.schedule.model_copy(update={"stages": stages, "updates_per_stage": updates_per_stage})
    return recipe.model_copy(update={"schedule": schedule})
