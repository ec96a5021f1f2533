"""A sealed stage scored by auxiliary models without a learner: processes that share only the run directory.

Shard I of N has every N-th update. A process writes the same parts as the run itself would, so the run takes over from
there, and a process that was killed continues where it was. Scoring holds the stage's lock together with other shards;
a process that merges all parts to a column holds it alone, as a run does while it scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from mugrpo_megatron.engine.client import MOST_FAILURES, Engine
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.extras.auxiliary.scoring import (
    AuxiliaryModel,
    Job,
    auxiliaries_of,
    samples_per_update,
    write_parts,
)
from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.directory import InUse, RunDirectory, file_lock
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.stages.store import StageStore


@dataclass(frozen=True, slots=True)
class ShardScoring:
    """One shard of a stage's scoring: every update whose number is `slot.number` modulo `slot.engines`."""

    recipe: Recipe
    store: StageStore
    """The sealed stage."""
    stage: int
    slot: EngineSlot
    display: Display
    stop: StopRequest

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.recipe.run.dir)

    def score(self) -> None:
        """Have the recipe's auxiliary models compute the shard's missing parts.

        Does nothing while the run itself scores the stage. Raises UserError as `scoring.auxiliaries_of`, EngineFailure
        after MOST_FAILURES failures in a row without a part between them, and Stopped when asked to stop.
        """
        try:
            with file_lock(self.directory.stage_lock(self.stage), shared=True, wait=True):
                for auxiliary in auxiliaries_of(self.recipe, self.directory, self.store, self.stage):
                    for job in auxiliary.jobs:
                        if missing := self._missing(job):
                            self._score(auxiliary, job, missing)
        except InUse:
            self.display.say(f"the run itself has stage {self.stage} scored by its auxiliary models")

    def _missing(self, job: Job) -> list[int]:
        return [update for update in job.parts.missing() if update % self.slot.engines == self.slot.number]

    def _score(self, auxiliary: AuxiliaryModel, job: Job, missing: list[int]) -> None:
        engine_recipe, stop = job.recipe(self.recipe, auxiliary.name, auxiliary.directory), self.stop
        log = self.directory.logs / f"auxiliary-{auxiliary.name}-shard-{self.slot.number + 1:04d}.log"
        title = f"stage {self.stage}, shard {self.slot.number}/{self.slot.engines}: {job.what} of {auxiliary.name}"
        width, failures = samples_per_update(self.recipe.rollout), 0
        engine = Engine.start(engine_spec(engine_recipe), auxiliary.directory, log, self.slot, stop.poll)
        try:
            with self.display.bar(title, len(missing), "updates") as bar:
                while missing and not stop.poll():
                    before, queue = len(missing), PromptQueue(missing)
                    failure = write_parts(engine, self.store, job, queue, width, stop, lambda update: bar.advance())
                    missing = self._missing(job)
                    if failure:
                        failures = failures + 1 if len(missing) == before else 1
                        if failures >= MOST_FAILURES:
                            raise EngineFailure(failure)
                        self.display.say(f"{failure}\nThe auxiliary model's engine is restarted for what is missing.")
                        engine.restart()
        finally:
            engine.stop()
        if stop.requested:
            raise stop.stopped(f"{job.what}: {len(missing)} updates of this shard are missing")

    def merge(self) -> str:
        """Merge complete parts to columns; return a phrase on what the stage still lacks, empty when it lacks nothing.

        Leaves the parts alone while other processes score the stage: the last of them merges.
        """
        incomplete = []
        try:
            with file_lock(self.directory.stage_lock(self.stage)):
                for auxiliary in auxiliaries_of(self.recipe, self.directory, self.store, self.stage):
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
