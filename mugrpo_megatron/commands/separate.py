"""`mugrpo generate` and `mugrpo optimize`: a stage's two phases as commands of their own, on one run directory."""

from __future__ import annotations

from pathlib import Path

from mugrpo_megatron.checks.preflight import check_run
from mugrpo_megatron.commands.common import say
from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.environment import rank_of_environment
from mugrpo_megatron.phases.saves import export
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.branch import branch, stage_to_take
from mugrpo_megatron.run.checkpoints import check_stage_held, newest_cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.run import open_run
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.train import generate_stage, optimize_stage


def generate_alone(
    recipe: Recipe, stage: int | None, problems: Problems | None = None, warm_host: HostProcess | None = None
) -> None:
    """Generate, score and seal the run's current stage, and have guests score it. Every rank runs this.

    The recipe is checked; `problems` and `warm_host` are those of `open_run`. Raises UserError when `stage` is given
    and is not the current one.
    """
    if _sealed(recipe, _current_stage(recipe, stage)) and not recipe.guest.by_name:
        say("the stage is sealed already; `mugrpo optimize` takes its updates")
        return
    if problems is None:
        recipe, problems = check_run(recipe)
    with open_run(recipe, problems, warm_host) as (run, learner, engines, cursor):
        generate_stage(run, learner, engines, cursor)
    say(f"{run.directory.stage(cursor.stage)} is sealed; `mugrpo optimize` takes its updates")


def optimize_alone(recipe: Recipe, stage: int | None, source: Path | None = None) -> None:
    """Take the updates of a sealed stage without an engine, and write the policy to `hf/`. Every rank runs this.

    Without an engine there is no evaluation inside the stage; `eval.every_updates` is ignored.

    With `source`, another run's directory or a published stage, `run.dir` first becomes a branch of it at the start of
    `stage`: the same responses and weights, with the recipe's own objective and optimizer. Raises UserError when
    `stage` is given and is not the current one, or when the stage is not sealed.
    """
    if source is not None:
        stage = stage_to_take(source, stage)
    if rank_of_environment() == 0:  # the other ranks wait for rank 0 where they join the world
        if source is not None and stage is not None:
            branch(recipe, source, stage)
        if not _sealed(recipe, _current_stage(recipe, stage)):
            raise UserError(
                f"{recipe.run.dir}: the stage is not complete; run `mugrpo generate` with this recipe first"
            )
    if recipe.eval.every_updates:
        say("eval.every_updates: nothing is evaluated inside the stage, since `mugrpo optimize` has no engine")
    with open_run(recipe, None, generates=False) as (run, learner, engines, cursor):
        after = optimize_stage(run, learner, engines, cursor)
        export(run, learner, after)
    say(f"stage {cursor.stage} is optimized; Hugging Face checkpoint: {run.directory.hf}")


def _current_stage(recipe: Recipe, stage: int | None) -> int:
    """The run's current stage; UserError when `stage` is given and is another."""
    directory = RunDirectory(recipe.run.dir)
    cursor = newest_cursor(directory.checkpoints)
    check_stage_held(directory, cursor)
    if cursor.finished(recipe.schedule):
        raise UserError(
            f"{recipe.run.dir} has taken all of its {cursor.updates} updates; `mugrpo train` finishes "
            "it, a larger schedule.stages continues it"
        )
    if stage not in (None, cursor.stage):
        raise UserError(
            f"{recipe.run.dir} is at stage {cursor.stage}, update {cursor.age} (both from 0), not at stage {stage}: "
            f"omit --stage, or branch with `mugrpo optimize --stage {stage} --from RUN_DIR`"
        )
    return cursor.stage


def _sealed(recipe: Recipe, stage: int) -> bool:
    return StageStore(RunDirectory(recipe.run.dir).stage(stage)).sealed
