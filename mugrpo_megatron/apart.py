"""The two phases of a stage run apart, on the same run directory: on other machines, in other layouts, days later."""

from __future__ import annotations

from pathlib import Path

from mugrpo_megatron.branch import branch
from mugrpo_megatron.checkpoints import newest_cursor
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.results import export
from mugrpo_megatron.rollout.store import StageStore
from mugrpo_megatron.run import open_run, rank_of_environment
from mugrpo_megatron.rundir import RunDirectory
from mugrpo_megatron.train import generate_stage, optimize_stage


def generate_alone(recipe: Recipe, stage: int | None) -> None:
    """Generate, score and seal the stage at which the run stands, `stage` where it is given. Every rank runs this.

    Raises UserError when the run stands elsewhere.
    """
    if _sealed(recipe, _standing(recipe, stage)):
        _say("the stage is sealed already; `mugrpo optimize` takes its updates")
        return
    with open_run(recipe) as run:
        generate_stage(run, run.cursor)
    _say(f"{run.directory.stage(run.cursor.stage)} is sealed; `mugrpo optimize` takes its updates")


def optimize_alone(recipe: Recipe, stage: int | None, source: Path | None = None) -> None:
    """Take the updates of a sealed stage without an engine, and write the policy to `hf/`. Every rank runs this.

    Without an engine nothing is evaluated, whatever `eval.every_updates` says.

    With `source`, another run's directory, `run.dir` first becomes a branch of it at the start of `stage`: the same
    responses and the same weights, whatever objective and optimizer the recipe now names. Raises UserError when the run
    stands elsewhere or the stage is not sealed.
    """
    if source is not None and stage is None:
        raise UserError("--from needs --stage: which of that run's stages is to be optimized again")
    if rank_of_environment() == 0:  # the other ranks wait for it where they join the world
        if source is not None and stage is not None:
            branch(recipe, source, stage)
        if not _sealed(recipe, _standing(recipe, stage)):
            raise UserError(
                f"{recipe.run.dir}: the stage is not complete; run `mugrpo generate` with this recipe first"
            )
    if recipe.eval.every_updates:
        _say("eval.every_updates: nothing is evaluated inside the stage, since `mugrpo optimize` has no engine")
    with open_run(recipe, generates=False) as run:
        optimize_stage(run, run.cursor)
        export(run, run.cursor)
    _say(f"stage {run.cursor.stage} is optimized; Hugging Face checkpoint: {run.directory.hf}")


def _standing(recipe: Recipe, stage: int | None) -> int:
    """The stage at which the run stands; UserError when `stage` is another."""
    cursor = newest_cursor(RunDirectory(recipe.run.dir).checkpoints)
    if cursor.finished(recipe.schedule):
        raise UserError(
            f"{recipe.run.dir} has taken all of its {cursor.updates} updates; `mugrpo train` ends it, a larger "
            "schedule.stages goes on"
        )
    if stage not in (None, cursor.stage):
        raise UserError(
            f"{recipe.run.dir} stands at stage {cursor.stage}, update {cursor.age} (both from 0), not at {stage}: "
            f"leave --stage out, or branch with `mugrpo optimize --stage {stage} --from RUN_DIR`"
        )
    return cursor.stage


def _sealed(recipe: Recipe, stage: int) -> bool:
    return StageStore(RunDirectory(recipe.run.dir).stage(stage)).sealed


def _say(text: str) -> None:
    if rank_of_environment() == 0:
        print(text)
