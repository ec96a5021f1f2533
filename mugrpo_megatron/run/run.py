"""The parts of a run that every phase uses. This module needs no Megatron: a process without a learner is a run too."""

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

    A process without a learner, such as `mugrpo eval` or a process that only generates, is a run whose world has one
    rank.
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
        """Whether this is the main rank, which prints and writes the run's files."""
        return self.world.rank == 0

    @property
    def evaluates_every(self) -> int:
        """The number of updates between two evaluations inside a stage; 0 if none take place there."""
        return self.recipe.eval.every_updates if self.world.engines else 0

    def stage_store(self, cursor: Cursor, writer: int = 0) -> StageStore:
        """The cursor's stage on disk; `writer` is the number of the rank's engine."""
        replay = self.recipe.learner.routing_replay
        origin = stage_origin(self.directory, self.record, cursor)
        return StageStore(self.directory.stage(cursor.stage), writer, origin, replay)

    def stop_if_asked(self, cursor: Cursor, kept: str = "") -> None:
        """If any rank was asked to stop, end the run, with the learner saved (`save_and_stop`). Collective."""
        if self.world.any_rank(self.stop.requested):
            self.save_and_stop(cursor, kept)

    def save_and_stop(self, cursor: Cursor, kept: str = "") -> NoReturn:
        """Raise Stopped, which ends the run at the cursor; `kept` tells the user what is on disk already.

        Every rank calls this. The learner, if there is one, is saved while the run closes (`checkpoints.open_saver`),
        after the engines have ended, because a device may be too small for both.
        """
        if self.learner_saver is None:
            raise self.stop.stopped(kept)
        raise AllStopped(f"{kept}; " if kept else "", self.stop.code, cursor)

    @contextmanager
    def phase(self, phase: str, cursor: Cursor) -> Iterator[dict[str, float]]:
        """Log the block as a phase of the run, with the metrics that the block puts into the yielded dict.

        If there is a metric `tokens`, tokens per second are added. During the block, heartbeats and errors about lost
        ranks name the phase.
        """
        with self.log.phase(phase, cursor.stage) as facts:
            start = self.log.clock()
            with self.world.named(f"{phase} of stage {cursor.stage}"):
                yield facts
            seconds = self.log.clock() - start
            if facts.get("tokens") and seconds > 0:
                facts["tokens_per_second"] = facts["tokens"] / seconds
                facts["tokens_per_second_per_device"] = facts["tokens"] / seconds / self.world.size
