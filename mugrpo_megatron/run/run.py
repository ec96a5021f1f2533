"""The parts of a run that every phase uses. Needs no Megatron: a process without a learner is a run as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory, stage_origin
from mugrpo_megatron.run.record import RunRecord
from mugrpo_megatron.run.stopping import AllStopped, StopRequest
from mugrpo_megatron.run.world import World
from mugrpo_megatron.stages.store import StageStore

if TYPE_CHECKING:
    from mugrpo_megatron.run.checkpoints import Saver


@dataclass(frozen=True)
class Run:
    """The parts of a run that every phase uses, besides learner and engines.

    A process without a learner is a run whose world has one rank: a shard of generation, `mugrpo eval`.
    """

    recipe: Recipe
    directory: RunDirectory
    world: World
    log: MetricLog
    display: Display
    record: RunRecord
    learner_saver: Saver | None = None
    """Saves the learner; None in a process without a learner."""

    @property
    def stop(self) -> StopRequest:
        return self.world.stop

    @property
    def saver(self) -> Saver:
        assert self.learner_saver, "a process without a learner saves none"
        return self.learner_saver

    @property
    def is_main(self) -> bool:
        """True on the rank that writes metrics and checkpoints and prints."""
        return self.world.rank == 0

    @property
    def evaluates_every(self) -> int:
        """Updates between two evaluations inside a stage; 0 if there are no such evaluations, and without engines."""
        return self.recipe.eval.every_updates if self.world.engines else 0

    def stage_store(self, cursor: Cursor, writer: int = 0) -> StageStore:
        """The cursor's stage on disk; `writer` is the number of the rank's engine."""
        replay = self.recipe.learner.routing_replay
        origin = stage_origin(self.directory, self.record, cursor)
        return StageStore(self.directory.stage(cursor.stage), writer, origin, replay)

    def stop_if_asked(self, cursor: Cursor, kept: str = "") -> None:
        """End the run as `save_and_stop` does, if any rank was asked to stop. Collective."""
        if self.world.any_rank(self.stop.requested):
            self.save_and_stop(cursor, kept)

    def save_and_stop(self, cursor: Cursor, kept: str = "") -> NoReturn:
        """End the run at the cursor because it was asked to stop; `kept` says what is on disk besides the learner.

        Every rank calls this. A learner is saved as the run closes (`checkpoints.open_saver`), after the engines have
        ended: a device may not hold both.
        """
        if self.learner_saver is None:
            raise self.stop.stopped(kept)
        raise AllStopped(f"{kept}; " if kept else "", self.stop.code, cursor)

    @contextmanager
    def phase(self, phase: str, cursor: Cursor) -> Iterator[dict[str, float]]:
        """Log the block as a phase, with the metrics put into the yielded dict and the rates of its `tokens`.

        Heartbeats and the errors of lost ranks name the phase.
        """
        with self.log.phase(phase, cursor.stage) as facts:
            start = self.log.clock()
            with self.world.named(f"{phase} of stage {cursor.stage}"):
                yield facts
            seconds = self.log.clock() - start
            if facts.get("tokens") and seconds > 0:
                facts["tokens_per_second"] = facts["tokens"] / seconds
                facts["tokens_per_second_per_device"] = facts["tokens"] / seconds / self.world.size
