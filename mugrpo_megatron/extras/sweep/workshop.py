"""Several runs one after the other in one process: they share process groups, engines and problems, and nothing else.

A learner is built for each run and dropped with it, by the code that builds any run's: weights, optimizer state and
random streams are those of a run in a process of its own. What is saved is the start of the process (imports,
rendezvous, process groups) and of the engines.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mugrpo_megatron.data.prepare import Problems, prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.launch import check_allocator
from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.learner.groups import Ranks, initialize, joined, named_phase
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.observe.environment import finds_cuda, rank_of_environment
from mugrpo_megatron.observe.log import open_log
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.checkpoints import newest_cursor, open_saver
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.data import record_data
from mugrpo_megatron.run.directory import RunDirectory, open_directory
from mugrpo_megatron.run.leader import Engines, seat_of
from mugrpo_megatron.run.origin import stage_origin
from mugrpo_megatron.run.record import read_record
from mugrpo_megatron.run.run import Run, bridge_of, check_current_stage, restore, start_engines
from mugrpo_megatron.run.stopping import listening
from mugrpo_megatron.run.world import World, open_world, telling_failures
from mugrpo_megatron.weights.sync import Bridge


@dataclass
class Workshop:
    """What the runs share. Their recipes have the same model, data, layout, engine and rewards."""

    recipe: Recipe
    """Of any of the runs."""
    logs: Path
    """The engines' logs."""
    world: World
    display: Display
    problems: Problems | None
    """Read on the main rank."""
    stack: ExitStack
    """Ends the engines."""
    _started: tuple[Engines, int] | None = field(default=None, init=False)
    """This rank's engine and the number of all engines, once they have started."""

    @property
    def is_main(self) -> bool:
        return self.world.ranks.rank == 0

    @contextmanager
    def open(self, recipe: Recipe) -> Iterator[tuple[Run, Learner, Engines, Cursor]]:
        """`open_run` without engines, in this world: a run at its newest checkpoint. Collective."""
        gc.collect()  # of the run before: a model's modules refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        with ExitStack() as stack:
            own = RunDirectory(recipe.run.dir)
            directory = stack.enter_context(open_directory(recipe)) if self.is_main else own
            record = self.world.broadcast(read_record(directory.path) if self.is_main else None)
            assert record is not None
            newest = self.world.broadcast(newest_cursor(directory.checkpoints) if self.is_main else Cursor())
            if self.is_main:
                check_current_stage(directory, stage_origin(directory, record, newest, recipe.schedule), newest)
                if self.problems:
                    record_data(directory.path, self.problems)
            tracked = open_log(
                directory.path,
                recipe.track,
                updates_done=newest.updates,
                run_id=record.id,
                config=recipe.model_dump(mode="json"),
                write=self.is_main,
            )
            log = stack.enter_context(tracked)
            with log.phase("start", newest.stage):
                learner = build_learner(recipe, self.world.ranks)
                cursor = restore(learner, directory, record, log, self.display)
                saver = stack.enter_context(
                    open_saver(learner, directory.checkpoints, recipe.checkpoint, record.id, log)
                )
                engines = Engines(bridge_of(learner), None)
            yield Run(recipe, directory, self.world, log, self.display, saver, record), learner, engines, cursor

    def with_engines(self, run: Run, learner: Learner, engines: Engines) -> tuple[Run, Engines]:
        """The run with the engines, which the first call starts; they sleep until the first sync. Collective.

        Raises EngineFailure when they do not start.
        """
        if self._started is None:
            with run.log.phase("start", 0):
                self._started = self._start(learner, engines.bridge)
        started, number = self._started
        return replace(run, world=replace(self.world, engines=number)), replace(started, bridge=engines.bridge)

    def _start(self, learner: Learner, bridge: Bridge) -> tuple[Engines, int]:
        prepared = None
        if self.is_main and self.problems:
            tokenizer = load_tokenizer(self.recipe.model.directory)
            prepared = prepare(self.recipe.data, self.recipe.reward, tokenizer, self.problems)
        seat = seat_of(self.recipe, self.logs, self.world.stop.heard)
        try:
            engines = start_engines(learner, self.world, self.display, seat, prepared, bridge, self.stack)
        except UserError as error:
            raise EngineFailure(str(error)) from None
        return engines, seat.slot.engines


@contextmanager
def open_workshop(recipe: Recipe, logs: Path, problems: Problems | None) -> Iterator[Workshop]:
    """Join the world in the recipe's layout; SIGTERM and Ctrl-C become a request to stop while the block runs."""
    if finds_cuda():
        check_allocator()
    is_main = rank_of_environment() == 0
    with ExitStack() as stack:
        display = stack.enter_context(open_display(show=is_main))
        stop = stack.enter_context(listening(is_main))
        with stop.at_once("the sweep was still starting"):
            ranks: Ranks = initialize(recipe)
            stack.enter_context(joined(ranks))
            stack.enter_context(named_phase(ranks))
        world = open_world(ranks, recipe.run.collective_timeout_s, 0, stop)
        stack.callback(stop.leave)
        with telling_failures(ranks):
            yield Workshop(recipe, logs, world, display, problems, stack)
