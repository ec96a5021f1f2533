"""`mugrpo sweep`: objectives, rates, thresholds and scopes compared on one sealed stage of a run.

Each cell is a branch of the stage, as `mugrpo optimize --from` makes it, and is evaluated by engines that all cells
share and that start with the first evaluation.
"""

from __future__ import annotations

import traceback

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, TrainingFailure
from mugrpo_megatron.extras.sweep.cells import Sweep, claim_out
from mugrpo_megatron.extras.sweep.grid import Cell
from mugrpo_megatron.extras.sweep.table import publish
from mugrpo_megatron.extras.sweep.workshop import Workshop, open_workshop
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.observe.log import FILE_NAME, Row, read_rows
from mugrpo_megatron.observe.metrics import PLACE
from mugrpo_megatron.phases.saves import conclude
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.branch import branch
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import InUse, RunDirectory
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import Stopped
from mugrpo_megatron.stages.manifest import Origin
from mugrpo_megatron.train import optimize_stage


def run_sweep(sweep: Sweep, origin: Origin, problems: Problems | None) -> int:
    """Run every cell that is not finished, then show and write the table and the page. Every rank runs this.

    Returns 1 when a cell failed: it is named, the others go on, and the next call tries it again. Raises Stopped, with
    the cell that was asked to stop saved.
    """
    failed = 0
    with open_workshop(sweep.cells[0].recipe, sweep.out / "logs", problems) as shop:
        if shop.is_main:
            claim_out(sweep, origin)
            (sweep.out / "logs").mkdir(exist_ok=True)
        unfinished = shop.world.broadcast([not sweep.finished(cell) for cell in sweep.cells])
        for number, cell in enumerate(sweep.cells):
            if unfinished[number]:
                shop.display.say(f"cell {number + 1} of {len(sweep.cells)}: {cell.name}")
                failed += not _take(shop, sweep, cell)
                if shop.is_main:
                    publish(sweep, page=False)
        if shop.is_main:
            shop.display.table(publish(sweep, page=True))
            shop.display.say(f"cells: {sweep.out}, figures: cells.csv, curves: report.html")
    return 1 if failed else 0


def _take(shop: Workshop, sweep: Sweep, cell: Cell) -> bool:
    """Run one cell to its end; whether it finished.

    A failure of the updates is the same on every rank, so the other cells can go on. Any other failure ends the sweep
    where other ranks would wait for the one that failed.
    """
    note = sweep.failure(cell)
    try:
        if shop.is_main:
            branch(cell.recipe, sweep.source, sweep.stage)
            note.unlink(missing_ok=True)
        _optimize(shop, sweep, cell)
    except (Stopped, InUse, EngineFailure, CollectiveFailure):
        raise
    except Exception as error:
        if shop.world.ranks.world > 1 and not isinstance(error, TrainingFailure):
            raise
        if shop.is_main:
            write_text(note, "".join(traceback.format_exception(error)))
            shop.display.say(f"cell {cell.name} FAILED: {str(error) or type(error).__name__}; see {note}")
        return False
    return True


def _optimize(shop: Workshop, sweep: Sweep, cell: Cell) -> None:
    with shop.open(cell.recipe) as (run, learner, engines, cursor):
        _take_over_evaluation(run, sweep, cursor)
        if cursor.stage == sweep.stage:
            cursor = optimize_stage(run, learner, engines, cursor)
        run, engines = shop.with_engines(run, learner, engines)
        conclude(run, learner, engines, cursor)


def _take_over_evaluation(run: Run, sweep: Sweep, cursor: Cursor) -> None:
    """Log the source's evaluation of the weights at the stage's start, where the cell would evaluate them alike."""
    source = load_recipe(RunDirectory(sweep.source).recipe)
    own = run.recipe
    if (source.eval, source.data, source.reward) != (own.eval, own.data, own.reward):
        return
    updates = cursor.updates - cursor.age
    if not run.is_main or cursor.stage != sweep.stage or updates in run.log.evaluated:
        return
    for row in reversed(evaluations(sweep)):
        if row["update"] == updates:
            run.log.event("evaluation", f"the one of the stage's start is that of {sweep.source}")
            place = ("kind", "not_finite", *PLACE["eval"])
            figures = {key: value for key, value in row.items() if key not in place and value is not None}
            run.log.evaluation(cursor.stage, updates, 0, figures)
            return


def evaluations(sweep: Sweep) -> list[Row]:
    """The source's evaluations."""
    log = sweep.source / FILE_NAME
    return [row for row in read_rows(log) if row["kind"] == "eval"] if log.exists() else []
