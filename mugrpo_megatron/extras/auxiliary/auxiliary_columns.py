"""Columns of a stage that auxiliary models compute: which ones the recipe asks for, their parts, and a branch's links.

    auxiliary/stage00003-NAME.parts-3f2a90c1b7de/00017.parquet    an update's part; merged to a column once all exist

The folder's name ends with a digest of the column's stage, weights and settings, so that a column never gets parts that
were computed with other weights or settings.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary.models import directory_of
from mugrpo_megatron.files.durable import durable_file, full_disk_error
from mugrpo_megatron.phases.batches import score_column, teacher_column
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.branch import link_or_copy
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.stages.columns import LogprobColumn, ScoreColumn, TableColumn
from mugrpo_megatron.stages.store import StageStore, becomes_visible
from mugrpo_megatron.weights.families import fingerprint


def auxiliary_columns(
    recipe: Recipe, directory: RunDirectory, store: StageStore, stage: int
) -> Iterator[tuple[str, str, LogprobColumn | ScoreColumn]]:
    """Yield the columns that auxiliary models compute for a sealed stage: (auxiliary model, reward function, column).

    The reward function is "" for a teacher's column.
    """
    if recipe.objective.teacher and (logprobs := teacher_column(recipe, directory, store, stage)):
        yield recipe.objective.teacher, "", logprobs
    for function, judge in recipe.reward.judges.items():
        assert judge.model
        yield judge.model, function, score_column(recipe, directory, store, stage, function)


def link_columns(recipe: Recipe, source: RunDirectory, target: RunDirectory, stage: int) -> None:
    """Link the complete columns of `stage` in `source` into the branch `target`, or copy them if it is on another file
    system.

    A column is left out if `recipe` has another auxiliary model, question or parser for it, or if the model's weights
    have changed since it was computed. The branch then computes that column itself.
    """
    for name, _, column in auxiliary_columns(recipe, target, StageStore(target.stage(stage)), stage):
        original = replace(column, path=source.path / column.path.relative_to(target.path))
        if column.complete or not _has_weights(original, fingerprint(directory_of(recipe.auxiliary, name))):
            continue
        column.begin()
        for file, copy in ((original.path, column.path), (original.index, column.index)):
            copy.unlink(missing_ok=True)  # a branch that was killed may have left this copy
            link_or_copy(file, copy)


def _has_weights(column: TableColumn, weights: str) -> bool:
    try:
        return column.complete and bool(column.body()["weights"] == weights)
    except UserError:  # the column is damaged, or was computed with other settings than the recipe's
        return False


class ColumnParts:
    """The parts of one column on disk, a file for each update. Several processes may write parts at the same time, of
    different updates."""

    def __init__(self, column: TableColumn, weights: str, updates: int) -> None:
        """`weights` is `weights.families.fingerprint` of the auxiliary model's checkpoint, `updates` the stage's number
        of updates."""
        belongs = json.dumps([dict(column.identity), weights], sort_keys=True).encode()
        name = f"{column.path.stem}.parts-{hashlib.sha256(belongs).hexdigest()[:12]}"
        self._column, self._weights, self._updates = column, weights, updates
        self.directory = column.path.with_name(name)

    def missing(self) -> list[int]:
        """The numbers of the updates that have no part on disk; empty once the column is complete."""
        if self._column.complete:
            return []
        return [update for update in range(self._updates) if not self._path(update).exists()]

    def wait_for(self, updates: set[int]) -> bool:
        """Wait until the parts of `updates`, written by other processes, are visible on a shared file system.

        Returns False if they are not after VISIBLE_SECONDS.
        """
        return becomes_visible(lambda: updates.isdisjoint(self.missing()))

    def write(self, update: int, table: pa.Table) -> None:
        """Write an update's part; after a crash it is complete or absent. Raises UserError if the disk is full."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise full_disk_error(error, self.directory) or error from error
        with durable_file(self._path(update)) as file:
            pq.write_table(table, file, write_page_checksum=True)

    def read(self, update: int) -> pa.Table:
        """Read an update's part; raise UserError when it is damaged."""
        path = self._path(update)
        try:
            # Not with `pq.read_table`, which would import pyarrow.dataset.
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                return file.read(use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path}: damaged ({error}); remove it, and the same command computes it again") from None

    def merge(self) -> None:
        """Merge all parts into the column and remove them; if the column is complete already, only remove them."""
        if not self._column.complete:
            with self._column.write_tables(weights=self._weights) as append:
                for update in range(self._updates):
                    append(self.read(update))
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, update: int) -> Path:
        return self.directory / f"{update:05d}.parquet"
