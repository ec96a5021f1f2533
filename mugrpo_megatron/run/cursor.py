"""The cursor: the next update of a run, by stage and age."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mugrpo_megatron.recipe.sections import ScheduleSection


@dataclass(frozen=True, slots=True)
class Cursor:
    """Says which optimizer update of a run is next: the one on stage `stage` after `age` others.

    `age` counts the updates already taken on the stage's responses, which is also their staleness. Each of the stage's
    µ updates is taken `schedule.epochs` times. A run is finished after S µ x epochs updates; if stages end early,
    it takes more than S stages.
    """

    stage: int = 0
    age: int = 0
    updates: int = 0
    """Number of optimizer updates since the run began; it is also the version of the weights that the engines get."""
    repeated: int = 0
    """Number of updates before this stage that were not in their stage's first epoch, so that they used no new
    responses."""
    nats: float = 0.0
    """How far the policy has moved from the one that sampled the stage: a KL in nats, as `nats_moved` computes it."""

    def finished(self, schedule: ScheduleSection) -> bool:
        return self.updates >= schedule.total_updates

    def title(self, schedule: ScheduleSection) -> str:
        return f"stage {self.stage} of {schedule.stages}"

    def updates_sampled(self, schedule: ScheduleSection) -> int:
        """The number of updates for which the stage samples responses: its length by the schedule, or the number of
        updates that the run has left, if that is smaller.
        """
        return min(schedule.length(self.stage), schedule.total_updates - self._before_stage)

    def updates_taken(self, schedule: ScheduleSection, sampled: int) -> int:
        """The number of updates to take on a stage that holds the responses of `sampled` updates.

        It is `sampled` times the number of epochs, or the number of updates that the run has left, if that is smaller.
        """
        return min(sampled * schedule.epochs, schedule.total_updates - self._before_stage)

    def stage_positions(self, schedule: ScheduleSection, prompts_per_update: int) -> range:
        """The positions of the stage's prompts in the run's order of prompts.

        They begin after the last prompt that an earlier stage has trained on. So S=4, µ=64 and S=64, µ=4 train on the
        same problems in the same order, with any number of epochs.
        """
        start = (self._before_stage - self.repeated) * prompts_per_update
        return range(start, start + self.updates_sampled(schedule) * prompts_per_update)

    def advanced(self, schedule: ScheduleSection, sampled: int, exhausted: bool = False, nats: float = 0.0) -> Cursor:
        """The cursor after one more update on a stage that holds the responses of `sampled` updates.

        The stage ends with its last update, or early if `exhausted`. Unless it ends, `nats` becomes the new cursor's.
        """
        if exhausted or self.age + 1 >= self.updates_taken(schedule, sampled):
            repeated = max(0, self.age + 1 - sampled)
            return Cursor(self.stage + 1, 0, self.updates + 1, self.repeated + repeated)
        return Cursor(self.stage, self.age + 1, self.updates + 1, self.repeated, nats)

    def stage_progress(self, schedule: ScheduleSection, sampled: int) -> float:
        """The fraction of the stage's updates that have been taken, in [0, 1)."""
        return self.age / self.updates_taken(schedule, sampled)

    def due(self, every: int) -> bool:
        """Whether something that happens every `every` updates of a stage happens now: `age` is a multiple of `every`.

        False for `every` = 0 and at a stage's start.
        """
        return every > 0 and self.age > 0 and self.age % every == 0

    @property
    def _before_stage(self) -> int:
        return self.updates - self.age


SMOOTHING = 0.2
"""Weight of the newest update in the exponential mean of `nats_moved`."""
CHECKPOINTS = "stage[0-9][0-9][0-9][0-9][0-9]-age[0-9][0-9][0-9][0-9][0-9]"
"""Glob pattern of the names that `checkpoint_name` gives; a damaged checkpoint, which is renamed, does not match."""


def checkpoint_name(cursor: Cursor) -> str:
    """The name of the directory with the checkpoint from which a run resumes at `cursor`."""
    return f"stage{cursor.stage:05d}-age{cursor.age:05d}"


def nats_moved(cursor: Cursor, metrics: Mapping[str, float]) -> float:
    """The KL(behaviour | policy) of a response, in nats: an exponential mean of `kl_response` over a stage's updates.

    `metrics` has the metrics of the update at the cursor. An update without a token to train on leaves the mean
    unchanged.
    """
    # It is a mean because `kl_response` of a single update varies twofold from batch to batch in a small run.
    return cursor.nats + SMOOTHING * (metrics.get("kl_response", cursor.nats) - cursor.nats)


def stage_exhausted(nats: float, schedule: ScheduleSection) -> bool:
    """Whether the policy has moved so far (`nats_moved`) that the stage ends early, by `schedule.max_kl`."""
    # Callers must reduce this over ranks. Each rank sums its metrics itself, and the sums of two GPUs may differ in the
    # last bits, so that one rank would end the stage and another not.
    return nats > schedule.max_kl > 0
