"""A branch takes the columns that guests have computed of its stage, where its own guests would compute the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.guests.models import directory_of
from mugrpo_megatron.phases.batches import score_column, teacher_column
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.stages.columns import TableColumn
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint


def take_columns(recipe: Recipe, source: RunDirectory, target: RunDirectory, stage: int) -> None:
    """Give the branch in `target` the columns of `stage` in `source`: hard links, or copies on another file system.

    One of another guest, or of other weights, questions or parsers, is left out: the branch computes its own.
    """
    for name, column in _columns(recipe, target, stage):
        theirs = replace(column, path=source.path / column.path.relative_to(target.path))
        if column.whole or not _fits(theirs, fingerprint(directory_of(recipe, name))):
            continue
        column.begin()
        for path, copy in ((theirs.path, column.path), (theirs.index, column.index)):
            copy.unlink(missing_ok=True)  # of a branch that was killed
            try:
                os.link(path, copy)
            except OSError:
                shutil.copyfile(path, copy)


def _columns(recipe: Recipe, directory: RunDirectory, stage: int) -> Iterator[tuple[str, TableColumn]]:
    """The recipe's columns of a sealed stage, each with its guest's name."""
    store = StageStore(directory.stage(stage))
    if recipe.objective.teacher and (logprobs := teacher_column(recipe, directory, store, stage)):
        yield recipe.objective.teacher, logprobs
    for function, judge in recipe.reward.judges.items():
        assert judge.model
        yield judge.model, score_column(recipe, directory, store, stage, function)


def _fits(column: TableColumn, weights: str) -> bool:
    try:
        return column.whole and bool(column.body()["weights"] == weights)
    except UserError:  # damaged, or of something else than the recipe's
        return False
