"""Has auxiliary models score a sealed stage without a learner, in processes that share only the run directory.

Shard I of N has the updates I, I + N, I + 2 N and so on. A process writes the parts that the run itself would write, so
the run uses them, and a process that is started again computes only the missing ones. Processes that score shards hold
the stage's lock together. A process that merges all parts into a column holds it alone, as a run does while it scores
the stage.
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
    """Scores one shard of a stage: the updates whose number modulo `slot.engines` is `slot.number`."""

    run: Run
    """The run as this one process sees it: without a learner."""
    store: StageStore
    """The sealed stage."""
    cursor: Cursor
    slot: EngineSlot

    def score(self) -> None:
        """Have the recipe's auxiliary models compute the shard's missing parts.

        Does nothing but print a sentence while the run itself scores the stage. Raises UserError when a model's weights
        have changed since an earlier column; EngineFailure and Stopped as `scoring.run_job` does.
        """
        stage = self.cursor.stage
        try:
            with file_lock(self.run.directory.stage_lock(stage), shared=True, wait=True):
                for auxiliary in auxiliaries_of(self.run.recipe, self.run.directory, self.store, stage):
                    for job in auxiliary.jobs:
                        if self._missing(job):
                            self._score(auxiliary, job)
        except InUse:
            self.run.display.say(f"this process does nothing, since the run itself scores stage {stage} now")

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
        """Merge the parts of each column that has all of them; return a phrase for what the stage still lacks, or "".

        While other processes score the stage, parts are left alone: the last of these processes merges them.
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
            return "what other processes are computing now"
        return ", ".join(incomplete)
