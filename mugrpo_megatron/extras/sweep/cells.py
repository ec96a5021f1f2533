"""The cells of a sweep, their states on disk, and the checks before the first one runs.

A cell is one combination of settings, with a run of its own on the sweep's stage.

    OUT/sweep.json       the run and the stage that all cells are branches of
    OUT/CELL/            an ordinary run directory; summary.json is its last file, so a cell that has one is finished
    OUT/cells.csv        every cell's settings and figures
    OUT/report.html      all finished cells on one page

Megatron is not imported here.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from mugrpo_megatron.checks.preflight import check_run
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sweep.grid import Cell
from mugrpo_megatron.files.durable import make_directory, refuse_linked_folders, write_json
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.observe.log import FILE_NAME
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.rundata import read_run, seconds_by_phase
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.branch import check_branch
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.initial_model import with_model
from mugrpo_megatron.stages.manifest import Origin

MARK = "sweep.json"
FAILURE = "failure.txt"
"""File in a cell's logs/ with the traceback of its failure."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The cells of a grid, all on the sealed stage `stage` of the run in `source`."""

    source: Path
    stage: int
    out: Path
    cells: list[Cell]

    def directory(self, cell: Cell) -> RunDirectory:
        return RunDirectory(self.out / cell.name)

    def finished(self, cell: Cell) -> bool:
        return self.directory(cell).summary.exists()

    def failure(self, cell: Cell) -> Path:
        return self.directory(cell).logs / FAILURE

    def state(self, cell: Cell) -> str:
        """State of a cell: `finished`, `failed`, `begun` or `missing`."""
        if self.finished(cell):
            return "finished"
        if self.failure(cell).exists():
            return "failed"
        return "begun" if (self.directory(cell).path / FILE_NAME).exists() else "missing"


def check_sweep(sweep: Sweep) -> tuple[Sweep, Origin]:
    """Check all cells before one starts; raise UserError for the first that would be refused.

    Returns the sweep, whose recipes then name models on this machine, and the stage's origin.
    """
    origins = [check_branch(cell.recipe, sweep.source, sweep.stage) for cell in sweep.cells]
    _check_out(sweep, origins[0])
    cells = []
    for cell in sweep.cells:
        try:
            recipe, _ = check_run(with_model(cell.recipe, run_dir=sweep.source), generates=False)
        except UserError as error:
            raise UserError(f"cell {cell.name}: {error}") from None
        cells.append(replace(cell, recipe=recipe))
        _check_evaluation(sweep, cell)
    return replace(sweep, cells=cells), origins[0]


def claim_out(sweep: Sweep, origin: Origin) -> None:
    """Make the sweep's directory, and record in it the run and the stage that all cells are branches of."""
    make_directory(sweep.out, f"--out {sweep.out}")
    refuse_linked_folders(sweep.out, ["logs", *(cell.name for cell in sweep.cells)])
    write_json(sweep.out / MARK, {"run": origin.run, "stage": origin.stage, "of": str(sweep.source.resolve())})


def states(sweep: Sweep) -> str:
    """Every cell with its state, one in a line, and how long the unfinished ones will take."""
    states = {cell.name: sweep.state(cell) for cell in sweep.cells}
    lines = [f"{state:9} {name}" for name, state in states.items()]
    unfinished = sum(state != "finished" for state in states.values())
    ran = [read_run(sweep.directory(cell).path).seconds for cell in sweep.cells if states[cell.name] == "finished"]
    if ran:
        rest = f"about {duration(unfinished * statistics.median(ran))}, judged by the finished cells"
    elif seconds := _source_seconds(sweep):
        rest = f"about {duration(unfinished * seconds)} without evaluations, judged by the same stage in {sweep.source}"
    else:
        rest = "a time that is not known yet"
    done = len(states) - unfinished
    return "\n".join(
        [*lines, f"{done} of {len(states)} cells are finished" + (f"; the rest takes {rest}" * (unfinished > 0))]
    )


def _source_seconds(sweep: Sweep) -> float:
    """Seconds that the source run took for its own updates on the stage; 0 if it has not taken them all."""
    try:
        run = read_run(sweep.source)
    except UserError:
        return 0.0
    phases = [row for row in run.phases if row["stage"] == sweep.stage]
    return seconds_by_phase(phases).get("optimize", 0.0) if any(r["stage"] > sweep.stage for r in run.phases) else 0.0


def _check_out(sweep: Sweep, origin: Origin) -> None:
    """Raise UserError unless the directory of `--out` is missing, empty or that of a sweep of the same stage."""
    out = sweep.out
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UserError(f"--out {out} is not a directory; choose another directory")
    if not (out / MARK).exists():
        if any(out.iterdir()):
            raise UserError(f"--out {out} holds something that no sweep has written; choose another directory")
        return
    mark = read_json(out / MARK)
    if (mark.get("run"), mark.get("stage")) != (origin.run, origin.stage):
        raise UserError(
            f"--out {out} holds the sweep of stage {mark.get('stage')} of {mark.get('of')}; choose another directory"
        )


def _check_evaluation(sweep: Sweep, cell: Cell) -> None:
    """Raise UserError for a finished cell that was evaluated with another `[eval]` than its recipe has now.

    Its figures would not compare with those of the other cells.
    """
    recipe_file = sweep.directory(cell).recipe
    if sweep.finished(cell) and load_recipe(recipe_file).eval != cell.recipe.eval:
        raise UserError(
            f"cell {cell.name} was evaluated with other settings in [eval]; set them as in {recipe_file}, or choose "
            "another --out"
        )
