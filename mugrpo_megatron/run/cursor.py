"""The cursor: which update of which stage of a run comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mugrpo_megatron.recipe.sections import ScheduleSection


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next optimizer update: `age` of stage `stage`.

    `age` counts the updates already taken on the stage's responses, so it is also how stale they are. A run is finished
    after S µ updates; where stages end early, it takes more than S stages to get there.
    """

    stage: int = 0
    age: int = 0
    updates: int = 0
    """Optimizer updates taken since the run began; the version of the weights that the engines get."""

    def finished(self, schedule: ScheduleSection) -> bool:
        return self.updates >= schedule.total_updates

    def stage_updates(self, schedule: ScheduleSection) -> int:
        """Updates that the stage's responses are generated for: µ, or the run's remaining ones."""
        return min(schedule.updates_per_stage, schedule.total_updates - self._before_stage)

    def stage_positions(self, schedule: ScheduleSection, prompts_per_update: int) -> range:
        """Positions in the run's prompt order that the stage samples: they start where the last stage's ended.

        S=4, µ=64 and S=64, µ=4 therefore train on the same problems in the same order.
        """
        start = self._before_stage * prompts_per_update
        return range(start, start + self.stage_updates(schedule) * prompts_per_update)

    def advanced(self, schedule: ScheduleSection, ends_stage: bool = False) -> Cursor:
        """The cursor after one more update, which ends the stage when it is the last one or with `ends_stage`."""
        if ends_stage or self.age + 1 >= self.stage_updates(schedule):
            return Cursor(self.stage + 1, 0, self.updates + 1)
        return Cursor(self.stage, self.age + 1, self.updates + 1)

    def due(self, every: int) -> bool:
        """Whether a multiple of `every` updates of the stage are taken; False for `every` = 0 and at a stage's ends."""
        return every > 0 and self.age > 0 and self.age % every == 0

    @property
    def _before_stage(self) -> int:
        return self.updates - self.age


def stage_exhausted(metrics: Mapping[str, float], schedule: ScheduleSection) -> bool:
    """Whether an update's metrics say that the stage's responses are too stale to continue with."""
    return metrics["ess"] < schedule.min_ess or metrics["vetoed_fraction"] > schedule.max_vetoed
