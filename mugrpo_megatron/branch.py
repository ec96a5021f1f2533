"""A branch of a run: the responses and weights at the start of one of its stages, for another objective to train on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from mugrpo_megatron.checkpoints import checkpoint_name
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.log import FILE_NAME
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.rollout.store import StageStore
from mugrpo_megatron.rundir import RunDirectory, differing, open_directory, write_json
from mugrpo_megatron.schedule import Cursor

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
"""What a branch may change: what made neither the responses and their rewards nor the weights they came from."""


def branch(recipe: Recipe, source: Path, stage: int) -> None:
    """Make `run.dir` a run that stands at the start of `stage` of the run in `source`, with that stage sealed.

    Files are hard links where both lie on one file system, copies elsewhere; neither run changes a file in place. Does
    nothing when `run.dir` is that branch already. Raises UserError when the source lacks the stage or the checkpoint
    at its start, when the recipe changes what the responses came from, or when `run.dir` holds another run.
    """
    origin = {"run": str(source.resolve()), "stage": stage}
    of = RunDirectory(source)
    _check(recipe, of, stage)
    with open_directory(recipe) as directory:
        marker = directory.path / ORIGIN
        if marker.exists():
            if json.loads(marker.read_text(encoding="utf-8")) != origin:
                raise UserError(f"{directory.path} is a branch of something else ({marker}); choose another run.dir")
            return
        if (directory.path / FILE_NAME).exists():
            raise UserError(f"{directory.path} holds a run already; choose another run.dir for the branch")
        _link(of.stage(stage), directory.stage(stage))
        if stage > 0:
            start = checkpoint_name(Cursor(stage))
            _link(of.checkpoints / start, directory.checkpoints / start)
        write_json(marker, origin)


def _check(recipe: Recipe, source: RunDirectory, stage: int) -> None:
    if not source.recipe.exists():
        raise UserError(f"--from {source.path}: no run directory (it has no {source.recipe.name})")
    if not StageStore(source.stage(stage)).sealed:
        sealed = [int(path.name) for path in sorted((source.path / "stages").iterdir()) if StageStore(path).sealed]
        raise UserError(f"{source.path} has no sealed stage {stage} (stages count from 0); it has {sealed}")
    start = source.checkpoints / checkpoint_name(Cursor(stage))
    if stage > 0 and not start.exists():
        raise UserError(
            f"{start} is gone, so the weights that stage {stage} began with are too; a run keeps its newest "
            "`checkpoint.keep` checkpoints, and stage 0 needs none"
        )
    changed = [key for key in differing(load_recipe(source.recipe), recipe) if not key.startswith(FREE_TO_BRANCH)]
    if changed:
        raise UserError(f"a branch has its source's {', '.join(changed)}; take these keys from {source.recipe}")


def _link(source: Path, target: Path) -> None:
    """`target` becomes a directory of the same files; what a killed attempt left there goes."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):  # another file system
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
