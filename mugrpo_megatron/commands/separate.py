"""`mugrpo generate` and `mugrpo optimize`: a stage's two phases as commands of their own, on one run directory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.engine.placement import rank_of_environment
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.observe.log import FILE_NAME
from mugrpo_megatron.phases.finish import export
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.run.checkpoints import checkpoint_name, newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory, differing, open_directory
from mugrpo_megatron.run.run import open_run
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.train import generate_stage, optimize_stage


def generate_alone(recipe: Recipe, stage: int | None, found: Problems | None = None) -> None:
    """Generate, score and seal the run's current stage. Every rank runs this.

    `found` are the problems if they were read already. Raises UserError when `stage` is given and is not the current
    one.
    """
    if _sealed(recipe, _standing(recipe, stage)):
        _say("the stage is sealed already; `mugrpo optimize` takes its updates")
        return
    with open_run(recipe, found=found) as (run, learner, engines, cursor):
        generate_stage(run, learner, engines, cursor)
    _say(f"{run.directory.stage(cursor.stage)} is sealed; `mugrpo optimize` takes its updates")


def optimize_alone(recipe: Recipe, stage: int | None, source: Path | None = None) -> None:
    """Take the updates of a sealed stage without an engine, and write the policy to `hf/`. Every rank runs this.

    Without an engine there is no evaluation inside the stage; `eval.every_updates` is ignored.

    With `source`, another run's directory, `run.dir` first becomes a branch of it at the start of `stage`: the same
    responses and weights, with the recipe's own objective and optimizer. Raises UserError when `stage` is given and is
    not the current one, or when the stage is not sealed.
    """
    if source is not None and stage is None:
        raise UserError("--from needs --stage: the stage of that run to optimize again")
    if rank_of_environment() == 0:  # the other ranks wait for rank 0 where they join the world
        if source is not None and stage is not None:
            branch(recipe, source, stage)
        if not _sealed(recipe, _standing(recipe, stage)):
            raise UserError(
                f"{recipe.run.dir}: the stage is not complete; run `mugrpo generate` with this recipe first"
            )
    if recipe.eval.every_updates:
        _say("eval.every_updates: nothing is evaluated inside the stage, since `mugrpo optimize` has no engine")
    with open_run(recipe, generates=False) as (run, learner, engines, cursor):
        optimize_stage(run, learner, engines, cursor)
        export(run, learner, cursor)
    _say(f"stage {cursor.stage} is optimized; Hugging Face checkpoint: {run.directory.hf}")


def _standing(recipe: Recipe, stage: int | None) -> int:
    """The run's current stage; UserError when `stage` is given and is another."""
    cursor = newest_cursor(RunDirectory(recipe.run.dir).checkpoints)
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


def _say(text: str) -> None:
    if rank_of_environment() == 0:
        print(text)


ORIGIN = "branch.json"
FREE_TO_BRANCH = (
    "objective.",
    "optimizer.",
    "rollout.behaviour",
    "schedule.stages",
    "schedule.min_ess",
    "schedule.max_vetoed",
    "run.dir",
    "run.device",
    "run.collective_timeout_s",
    "data.eval",
    "sft.",
)
"""Keys that a branch may change: they affect neither the stage's responses and rewards nor its initial weights."""


def branch(recipe: Recipe, source: Path, stage: int) -> None:
    """Make `run.dir` a run at the start of `stage` of the run in `source`, with that stage sealed.

    Files are hard links where both lie on one file system, else copies; neither run changes a file in place. Does
    nothing when `run.dir` is that branch already. Raises UserError when the source lacks the stage or the checkpoint
    at its start, when the recipe changes what the responses were made with, or when `run.dir` holds another run.
    """
    origin = {"run": str(source.resolve()), "stage": stage}
    of = RunDirectory(source)
    _check(recipe, of, stage)
    with open_directory(recipe) as directory:
        marker = directory.path / ORIGIN
        if marker.exists():
            if json.loads(marker.read_text(encoding="utf-8")) != origin:
                raise UserError(f"{directory.path} is another branch ({marker}); choose another run.dir")
            return
        if (directory.path / FILE_NAME).exists():
            raise UserError(f"{directory.path} already holds a run; choose another run.dir for the branch")
        _link(of.stage(stage), directory.stage(stage))
        if stage > 0:
            start = checkpoint_name(Cursor(stage))
            _link(of.checkpoints / start, directory.checkpoints / start)
        write_json(marker, origin)


def _check(recipe: Recipe, source: RunDirectory, stage: int) -> None:
    if not source.recipe.exists():
        raise UserError(f"--from {source.path}: not a run directory (it has no {source.recipe.name})")
    if not StageStore(source.stage(stage)).sealed:
        sealed = [int(path.name) for path in sorted((source.path / "stages").iterdir()) if StageStore(path).sealed]
        raise UserError(f"{source.path} has no sealed stage {stage} (stages count from 0); it has {sealed}")
    start = source.checkpoints / checkpoint_name(Cursor(stage))
    if stage > 0 and not start.exists():
        raise UserError(
            f"{start} is missing, and with it the weights at the start of stage {stage}; a run keeps its newest "
            "`checkpoint.keep` checkpoints, and stage 0 needs none"
        )
    changed = [key for key in differing(load_recipe(source.recipe), recipe) if not key.startswith(FREE_TO_BRANCH)]
    if changed:
        raise UserError(f"a branch cannot change {', '.join(changed)}; take these keys from {source.recipe}")


def _link(source: Path, target: Path) -> None:
    """Replace `target` by a directory of the same files."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):  # another file system
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
