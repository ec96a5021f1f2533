"""`mugrpo seal`: seals a stage that engine-only processes have generated, once every group is present."""

from __future__ import annotations

from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.batch import standing
from mugrpo_megatron.run.directory import RunDirectory, locked
from mugrpo_megatron.run.record import with_model
from mugrpo_megatron.run.sealing import close_stage
from mugrpo_megatron.stages.store import StageStore


def seal(run_dir: Path) -> str:
    """Seal the stage at which the run stands, and say so.

    Raises UserError, with nothing changed, when the stage is not whole or not of one piece (`close_stage`), when a
    process still generates, and while a learner that takes the stage by itself is at work.
    """
    directory = RunDirectory(run_dir)
    if not directory.recipe.exists():
        raise UserError(f"{run_dir}: not a run directory (it has no {directory.recipe.name})")
    recipe = with_model(load_recipe(directory.recipe), run_dir=run_dir)
    where = standing(directory, recipe)
    stage = directory.stage(where.cursor.stage)
    with locked(directory.path / ".lock"):
        store = StageStore(stage, 0, where.origin)
        if store.sealed:
            store.remove_merged()
            return f"{stage} is sealed already; `mugrpo optimize` takes its updates"
        count = close_stage(directory, recipe, where)
    return f"{stage} is sealed: {count:,} groups; `mugrpo optimize` takes its updates, `mugrpo train` goes on from it"
