"""`mugrpo sweep`: compares objectives, learning rates, thresholds and other settings on one sealed stage of a run.

A cell is one combination of settings. Its run is a branch of the stage, as `mugrpo optimize --from` makes it. The cells
run one after the other in one process: they share process groups, engines and problems, and nothing else. Each cell has
a learner of its own, built as for any run, so weights, optimizer state and random streams are those of a run in a
process of its own. Compared with such runs, a sweep saves the start of the process and of the engines.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.data.prepare import Problems, prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.launch import check_allocator
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, TrainingFailure, UserError
from mugrpo_megatron.extras.sweep.cells import Sweep, claim_out
from mugrpo_megatron.extras.sweep.grid import Cell
from mugrpo_megatron.extras.sweep.table import publish
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.learner.groups import Ranks, initialize, named_phase, shutdown_after
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.observe.environment import rank_of_environment
from mugrpo_megatron.observe.log import FILE_NAME, open_log, read_rows
from mugrpo_megatron.observe.metrics import ROW_KEYS
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.phases.saves import write_results
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.run.branch import branch
from mugrpo_megatron.run.checkpoints import newest_cursor, open_saver
from mugrpo_megatron.run.connected import broadcast_failure, open_world
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import InUse, RunDirectory, open_directory, stage_origin
from mugrpo_megatron.run.engines import Engines, start_engines
from mugrpo_megatron.run.inputs import record_data
from mugrpo_megatron.run.leader import launch
from mugrpo_megatron.run.opening import clean_current_stage, offload_learner, restore_learner, weight_sync_of
from mugrpo_megatron.run.record import read_record
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import Stopped, handle_signals
from mugrpo_megatron.run.world import World
from mugrpo_megatron.stages.manifest import Origin
from mugrpo_megatron.train import evaluate_policy, optimize_stage
from mugrpo_megatron.weights.sync import WeightSync


def run_sweep(sweep: Sweep, origin: Origin, problems: Problems | None) -> int:
    """Run every cell that is not finished, then show and write the table and the page. Every rank runs this.

    Returns 1 when a cell failed: the cell is named, the other cells run, and the next call tries it again. Raises
    Stopped, with the running cell saved, when asked to stop.
    """
    failed = 0
    with open_sweep(sweep.cells[0].recipe, sweep.out / "logs", problems) as context:
        if context.is_main:
            claim_out(sweep, origin)
            (sweep.out / "logs").mkdir(exist_ok=True)
        unfinished = context.world.broadcast([not sweep.finished(cell) for cell in sweep.cells])
        for number, cell in enumerate(sweep.cells):
            if unfinished[number]:
                context.display.say(f"cell {number + 1} of {len(sweep.cells)}: {cell.name}")
                failed += not _run_cell(context, sweep, cell)
                if context.is_main:
                    publish(sweep, page=False)
        if context.is_main:
            context.display.table(publish(sweep, page=True))
            context.display.say(f"cells: {sweep.out}, figures: cells.csv, curves: report.html")
    return 1 if failed else 0


def _run_cell(context: SweepContext, sweep: Sweep, cell: Cell) -> bool:
    """Run one cell to its end; returns whether it finished.

    A failure of the updates is the same on every rank, so the other cells can go on. With several ranks, any other
    failure ends the sweep, since other ranks would wait for the one that failed. A request to stop, a directory in use
    by another process and a failed engine or collective always end the sweep.
    """
    note = sweep.failure(cell)
    try:
        if context.is_main:
            branch(cell.recipe, sweep.source, sweep.stage)
            note.unlink(missing_ok=True)
        _optimize_cell(context, sweep, cell)
    except (Stopped, InUse, EngineFailure, CollectiveFailure):
        raise
    except Exception as error:
        if context.world.size > 1 and not isinstance(error, TrainingFailure):
            raise
        if context.is_main:
            write_text(note, "".join(traceback.format_exception(error)))
            context.display.say(f"cell {cell.name} FAILED: {str(error) or type(error).__name__}; see {note}")
        return False
    return True


def _optimize_cell(context: SweepContext, sweep: Sweep, cell: Cell) -> None:
    with context.open(cell.recipe) as (run, learner, engines, cursor):
        _take_over_evaluation(run, sweep, cursor)
        if cursor.stage == sweep.stage:
            cursor = optimize_stage(run, learner, engines, cursor)
        run, engines = context.with_engines(run, learner, engines)
        evaluate_policy(run, learner, engines, cursor)
        write_results(run, learner, cursor)


def _take_over_evaluation(run: Run, sweep: Sweep, cursor: Cursor) -> None:
    """Copy the source run's evaluation at the stage's start to the cell's log, if both have the same `[eval]`, `[data]`
    and `[reward]`."""
    source = load_recipe(RunDirectory(sweep.source).recipe)
    recipe = run.recipe
    if (source.eval, source.data, source.reward) != (recipe.eval, recipe.data, recipe.reward):
        return
    updates = cursor.updates - cursor.age
    if not run.is_main or cursor.stage != sweep.stage or updates in run.log.evaluated:
        return
    log = sweep.source / FILE_NAME
    for row in reversed(read_rows(log)) if log.exists() else ():
        if row["kind"] == "eval" and row["update"] == updates:
            run.log.event("evaluation", f"that of the stage's start is copied from {sweep.source}")
            known_keys = ("kind", "not_finite", *ROW_KEYS["eval"])
            figures = {key: value for key, value in row.items() if key not in known_keys and value is not None}
            run.log.evaluation(cursor.stage, updates, 0, figures)
            return


@dataclass
class SweepContext:
    """What the cells share: process groups, engines and problems. Their recipes have the same model, data, layout,
    engine and rewards."""

    recipe: Recipe
    """The recipe of one of the cells: what the cells share is the same in all."""
    logs: Path
    """Directory of the engines' logs."""
    ranks: Ranks
    world: World
    display: Display
    problems: Problems | None
    """The problems, which only the main rank reads."""
    stack: ExitStack
    """Ends the engines when it is closed."""
    _started: tuple[Engines, int] | None = field(default=None, init=False)
    """This rank's engine and the number of all engines, once they have started."""

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    @contextmanager
    def open(self, recipe: Recipe) -> Iterator[tuple[Run, Learner, Engines, Cursor]]:
        """Open a cell's run at its newest checkpoint, as `open_run` does, but without engines and with the process
        groups of this context. Collective."""
        gc.collect()  # frees the model of the previous cell, whose modules refer to each other in circles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        with ExitStack() as stack:
            own = RunDirectory(recipe.run.dir)
            directory = stack.enter_context(open_directory(recipe)) if self.is_main else own
            record = self.world.broadcast(read_record(directory.path) if self.is_main else None)
            assert record is not None
            newest = self.world.broadcast(newest_cursor(directory.checkpoints) if self.is_main else Cursor())
            if self.is_main:
                clean_current_stage(directory, stage_origin(directory, record, newest), newest)
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
                learner = build_learner(recipe, self.ranks)
                cursor = restore_learner(learner, directory, record, log, self.display)
                saver = stack.enter_context(
                    open_saver(learner, directory.checkpoints, recipe.checkpoint, record.id, log)
                )
                engines = Engines(self.world, recipe.engine, weight_sync_of(learner))
            yield Run(recipe, directory, self.world, log, self.display, record, saver), learner, engines, cursor

    def with_engines(self, run: Run, learner: Learner, engines: Engines) -> tuple[Run, Engines]:
        """The run with the engines, which the first call starts; they sleep until the first sync. Collective.

        Raises EngineFailure when they do not start.
        """
        if self._started is None:
            with run.log.phase("start", 0):
                self._started = self._start(learner, engines.weight_sync)
        started, number = self._started
        started = replace(started, section=engines.section, weight_sync=engines.weight_sync)
        return replace(run, world=replace(self.world, engines=number)), started

    def _start(self, learner: Learner, weight_sync: WeightSync) -> tuple[Engines, int]:
        prepared = None
        if self.is_main and self.problems:
            tokenizer = load_tokenizer(self.recipe.model.directory)
            prepared = prepare(self.recipe.data, self.recipe.reward, tokenizer, self.problems)
        offload_learner(learner, self.world)
        launched = launch(self.recipe, self.logs, self.world.stop.poll, self.stack)
        try:
            engines = start_engines(self.recipe, launched, self.world, weight_sync, prepared, self.display)
        except UserError as error:
            raise EngineFailure(str(error)) from None
        learner.reload()
        return engines, launched.slot.engines


@contextmanager
def open_sweep(recipe: Recipe, logs: Path, problems: Problems | None) -> Iterator[SweepContext]:
    """Start process groups in the recipe's layout, and yield what the cells share.

    While the block runs, SIGTERM and Ctrl-C become a request to stop.
    """
    if finds_cuda():
        check_allocator()
    is_main = rank_of_environment() == 0
    with ExitStack() as stack:
        display = stack.enter_context(open_display(show=is_main))
        stop = stack.enter_context(handle_signals(is_main))
        with stop.at_once("the sweep was still starting"):
            ranks: Ranks = initialize(recipe.run, recipe.parallel, recipe.learner.threads)
            stack.enter_context(shutdown_after(ranks))
            stack.enter_context(named_phase(ranks))
        world = open_world(ranks, recipe.run.collective_timeout_s, 0, stop)
        stack.callback(stop.detach)
        with broadcast_failure(ranks):
            yield SweepContext(recipe, logs, ranks, world, display, problems, stack)
