"""A sealed stage scored by auxiliary models without a learner: processes that share only the run directory.

Shard I of N has every N-th update. A process writes the same parts as the run itself would, so the run takes over from
there, and a process that was killed continues where it was. Scoring holds the stage's lock together with other shards;
a process that merges all parts to a column holds it alone, as a run does while it scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.extras.auxiliary.scoring import AuxiliaryModel, Job, auxiliaries_of, run_job
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import InUse, file_lock
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.leader import LedEngine
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.stages.store import StageStore


@dataclass(frozen=True, slots=True)
class ShardScoring:
    """One shard of a stage's scoring: every update whose number is `slot.number` modulo `slot.engines`."""

    run: Run
    """The run as this one process sees it: without a learner."""
    store: StageStore
    """The sealed stage."""
    cursor: Cursor
    slot: EngineSlot

    def score(self) -> None:
        """Have the recipe's auxiliary models compute the shard's missing parts.

        Does nothing while the run itself scores the stage. Raises UserError as `scoring.auxiliaries_of`, the others as
        `scoring.run_job`.
        """
        stage = self.cursor.stage
        try:
            with file_lock(self.run.directory.stage_lock(stage), shared=True, wait=True):
                for auxiliary in auxiliaries_of(self.run.recipe, self.run.directory, self.store, stage):
                    for job in auxiliary.jobs:
                        if self._missing(job):
                            self._score(auxiliary, job)
        except InUse:
            self.run.display.say(f"the run itself has stage {stage} scored by its auxiliary models")

    def _missing(self, job: Job) -> list[int]:
        return [update for update in job.parts.missing() if update % self.slot.engines == self.slot.number]

    def _score(self, auxiliary: AuxiliaryModel, job: Job) -> None:
        run, slot = self.run, self.slot
        engine_recipe = job.recipe(run.recipe, auxiliary.name, auxiliary.directory)
        log = run.directory.logs / f"auxiliary-{auxiliary.name}-shard-{slot.number + 1:04d}.log"
        title = f"stage {self.cursor.stage}, shard {slot.number}/{slot.engines}: {job.what} of {auxiliary.name}"
        engine = Engine.start(engine_spec(engine_recipe), auxiliary.directory, log, slot, run.stop.poll)
        try:
            led = LedEngine(engine=engine)
            run_job(run, led, 1, self.store, job, lambda: self._missing(job), title, self.cursor)
        finally:
            engine.stop()

    def merge(self) -> str:
        """Merge complete parts to columns; return a phrase on what the stage still lacks, empty when it lacks nothing.

        Leaves the parts alone while other processes score the stage: the last of them merges.
        """
        incomplete = []
        try:
            with file_lock(self.run.directory.stage_lock(self.cursor.stage)):
                for auxiliary in auxiliaries_of(self.run.recipe, self.run.directory, self.store, self.cursor.stage):
                    for job in auxiliary.jobs:
                        if missing := len(job.parts.missing()):
                            incomplete.append(
                                f"{job.what} of {auxiliary.name} ({missing} of {self.store.updates} updates)"
                            )
                        else:
                            job.parts.merge()
        except InUse:
            return "what they are computing"
        return ", ".join(incomplete)
