"""Columns of a stage that auxiliary models compute: which the recipe asks for, and which a branch takes over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary.models import directory_of
from mugrpo_megatron.phases.batches import score_column, teacher_column
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.branch import link_or_copy
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.stages.columns import LogprobColumn, ScoreColumn, TableColumn
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint


def auxiliary_columns(
    recipe: Recipe, directory: RunDirectory, store: StageStore, stage: int
) -> Iterator[tuple[str, str, LogprobColumn | ScoreColumn]]:
    """Columns that auxiliary models compute of a sealed stage: (auxiliary model, reward function, column).

    The reward function is empty in a teacher's column.
    """
    if recipe.objective.teacher and (logprobs := teacher_column(recipe, directory, store, stage)):
        yield recipe.objective.teacher, "", logprobs
    for function, judge in recipe.reward.judges.items():
        assert judge.model
        yield judge.model, function, score_column(recipe, directory, store, stage, function)


def link_columns(recipe: Recipe, source: RunDirectory, target: RunDirectory, stage: int) -> None:
    """Link the columns of `stage` from `source` to the branch in `target`; copy them on another file system.

    A column of another auxiliary model, other weights, another question or parser is left out, and the branch computes
    its own.
    """
    for name, _, column in auxiliary_columns(recipe, target, StageStore(target.stage(stage)), stage):
        original = replace(column, path=source.path / column.path.relative_to(target.path))
        if column.whole or not _has_weights(original, fingerprint(directory_of(recipe.auxiliary, name))):
            continue
        column.begin()
        for file, copy in ((original.path, column.path), (original.index, column.index)):
            copy.unlink(missing_ok=True)  # of a branch that was killed
            link_or_copy(file, copy)


def _has_weights(column: TableColumn, weights: str) -> bool:
    try:
        return column.whole and bool(column.body()["weights"] == weights)
    except UserError:  # damaged, or computed with other settings than the recipe's
        return False
