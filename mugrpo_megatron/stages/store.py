"""The durable stage: generation writes it, optimization reads it; the only interface between the two.

The life of a stage in stages/00003/. Appending and sealing end by replacing the writer's manifest, durably.

    step     written by           files                                read by          a kill leaves
    append   every engine's rank  shard-00000.parquet, manifest.json,  a resumed run    shards that a manifest lists;
             (a writer), its own  shard-0002-00000.parquet and                          other groups are made again
             groups               manifest-0002.json (of writer 2)
    seal     writer 0, when all   stage.parquet: row group k holds     optimize_stage,  before the manifest: the shards,
             groups are written   update k, its groups in order;       publish          to be sealed again; after it:
                                  then the shards are removed                           shards to be removed
    columns  one rank, after a    behaviour.parquet, behaviour.json    optimize_stage   no .json: the pass is run again
             pass over the stage  and others (columns.py, routes.py)
    updates  nobody               none; checkpoints are elsewhere      read_update(k)   an unchanged stage: the run
                                                                                        resumes at any update

Each file has one writer; any number of processes may read. The schema is in `schema.py`.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.algorithm.advantages import before_penalty
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import digest, durable_file, fsync, full_disk_error, remove_leftovers
from mugrpo_megatron.recipe.systems import Replay
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.manifest import (
    DIGITS,
    SEALED_NAME,
    SHARD_PATTERNS,
    Manifest,
    Origin,
    SealedFile,
    StageShard,
    check_listed,
    check_origin,
    check_stage,
    intact,
    manifest_name,
    other_shards,
    parquet_spans,
    read_manifest,
    shard_name,
    stage_identity,
    verify,
    write_manifest,
)
from mugrpo_megatron.stages.routes import route_column, split_routes, with_routes, without_routes
from mugrpo_megatron.stages.schema import (
    COMPRESSION,
    ShardBuffer,
    StageStatistics,
    check_file,
    check_rows,
    check_same_columns,
    optional_columns,
    penalties_of,
    to_samples,
    training_columns,
    without_nulls,
    write_shard,
)

ROW_GROUPS_IN_MEMORY = 32
"""Most decoded row groups of shards that sealing keeps. An update's rows are in several of them, since its groups
finish at different times."""
VISIBLE_SECONDS = 20.0
"""Longest wait for a file that another node has written to appear on a shared file system."""
REMEDY = "restore it from a copy, or remove the stage's directory to generate the stage again"

RowRange = tuple[int, int, int]
"""Index of a row group in a Parquet file, index of the first row in it, number of rows."""


def becomes_visible(condition: Callable[[], bool]) -> bool:
    """Wait until `condition` is true on a shared file system; False if it is not after VISIBLE_SECONDS."""
    # NFS caches a directory's attributes for seconds, so a file that another node has written may not be seen here yet.
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def usable_shards(directory: Path, shards: list[StageShard], groups: set[int]) -> list[StageShard]:
    """Returns the shards that are intact; UserError when one of `groups` is only in damaged shards."""
    usable = intact(directory, shards)
    lost = groups.difference(*(shard.groups for shard in usable))
    for shard in shards:
        if lost.intersection(shard.groups):
            verify(directory / shard.file, shard.span, "run the same command again to generate its groups again")
    return usable


def update_rows(directory: Path, shards: list[StageShard], updates: int, prompts_per_update: int) -> Iterator[pa.Table]:
    """Yield for each update the table of its rows, in the order of its groups, gathered from the shards. Raises
    UserError for rows that cannot be trained on."""
    shard_of = {group: shard for shard in shards for group in shard.groups}
    row_ranges = {shard.file: _row_ranges(directory / shard.file, shard) for shard in shards}

    # Groups finish in any order, so an update's rows are in several shards. With the cache each row group is decoded
    # about once, and the whole stage, which may be larger than the node's memory, is never in memory.
    @lru_cache(maxsize=ROW_GROUPS_IN_MEMORY)
    def read(file: str, row_group: int) -> pa.Table:
        with pq.ParquetFile(directory / file) as shard:
            return shard.read_row_group(row_group, use_threads=False)

    for update in range(updates):
        rows = []
        groups = range(update * prompts_per_update, (update + 1) * prompts_per_update)
        for group in groups:
            file = shard_of[group].file
            row_group, start, length = row_ranges[file][group]
            rows.append(read(file, row_group).slice(start, length))
        # Shards that another program has written may differ in which columns allow nulls; the checked table allows none
        # that a stage forbids.
        table = pa.concat_tables(rows, promote_options="default").combine_chunks()
        check_rows(directory, table, groups, REMEDY)
        yield table.cast(without_nulls(table.schema))


def _row_ranges(path: Path, shard: StageShard) -> dict[int, RowRange]:
    """Group -> where its rows are in the file of a shard. Raises UserError when the file does not match the shard's
    entry in the manifest."""
    layout = pq.read_metadata(path)
    check_file(path, without_routes(layout.schema.to_arrow_schema()), REMEDY)
    starts = [0, *accumulate(layout.row_group(i).num_rows for i in range(layout.num_row_groups))]
    row_ranges = {}
    for group, rows, end in zip(shard.groups, shard.rows, accumulate(shard.rows), strict=True):
        row_group = bisect_right(starts, end - rows) - 1
        if end > starts[-1] or end > starts[row_group + 1]:
            raise UserError(f"{path}: its rows do not match its manifest; {REMEDY}")
        row_ranges[group] = (row_group, end - rows - starts[row_group], rows)
    return row_ranges


class StageStore:
    """The files of one stage in `directory`: appends groups, seals the stage, reads its updates.

    Several processes may append, each with its own `writer` number and its own groups: the queue of prompts gives a
    group to one engine only. Writer 0 seals what all of them wrote, once all have finished writing.
    """

    def __init__(self, directory: Path, writer: int = 0, origin: Origin | None = None, replay: Replay = "off") -> None:
        """`origin` is written into the manifest; if the stage exists already, it must have the same origin.

        `replay` says whose expert choices the samples get when they are read (`learner.routing_replay`).
        """
        self.directory, self.replay = directory, replay
        self._writer, self._origin = writer, origin
        self._buffer = ShardBuffer()
        self._groups: set[int] = set()
        """Groups that this store has buffered or its writer has written, in earlier processes too."""
        self._columns: tuple[str, ...] | None = None
        """Names of the stage's columns, which later groups must have too: all columns if the stage had shards already,
        else the optional ones. None before the first group."""
        self._manifest: Manifest | None = None
        """Set once this store writes: from then on only this store changes its writer's manifest."""
        self._sealed_file: SealedFile | None = None
        """Set once the stage was found sealed, after which the stage never changes again."""
        self._layout: pq.FileMetaData | None = None
        self._rewards: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def sealed(self) -> bool:
        """Whether the stage is complete: every group is on disk in its final place.

        It is a property although it may read a file: the manifest is small, and is not read again once the stage is
        sealed.
        """
        # Only writer 0 seals, so it knows its own manifest; every other process has to read the file again.
        if self._sealed_file is None and (self._manifest is None or self._writer):
            manifest = read_manifest(self.directory)
            check_origin(self.directory, manifest, self._origin)
            self._sealed_file = manifest.sealed
        return self._sealed_file is not None

    @property
    def updates(self) -> int:
        """Number of updates for which the sealed stage has responses."""
        return self._require_sealed().updates

    @property
    def content(self) -> str:
        """A checksum of the sealed stage's responses; copies of a stage have the same checksum in any directory."""
        return self._require_sealed().content

    @property
    def file(self) -> str:
        return self._require_sealed().file

    def verify(self) -> None:
        """Read the whole sealed stage; raise UserError if a part of its file does not match the part's checksum."""
        sealed = self._require_sealed()
        self._checked_layout()
        for span in (*sealed.row_groups, *sealed.text_columns):
            verify(self.directory / sealed.file, span, REMEDY)

    def statistics(self) -> dict[str, float]:
        """The metrics of the sealed stage's responses (`schema.StageStatistics`)."""
        return self._require_sealed().statistics

    def verified_groups(self) -> set[int]:
        """The indices of the groups that are intact on disk; damaged shards are logged and left out. For a sealed stage
        these are all groups, and the responses are not read.

        Groups that are only buffered do not count, so a resumed stage generates exactly what is missing.
        """
        if self.sealed:
            return set(range(self._require_sealed().updates * self._require_sealed().prompts_per_update))
        return {group for shard in intact(self.directory, self._shards()) for group in shard.groups}

    def listed_groups(self) -> set[int]:
        """The indices of the groups that the manifests list; none once the stage is sealed. Shards are not read."""
        return {group for shard in self._shards() for group in shard.groups}

    @property
    def own_groups(self) -> set[int]:
        """The indices of the groups that this store has buffered or its writer has written, in earlier processes too;
        empty before the first `append`."""
        return set(self._groups)

    def wait_for(self, groups: set[int], sealed: bool) -> bool:
        """With `sealed`, wait until the stage is sealed, else until the manifests list `groups`; False if that takes
        longer than VISIBLE_SECONDS."""
        return becomes_visible(lambda: self.sealed if sealed else self.listed_groups() >= groups)

    def append(self, group: list[Sample]) -> None:
        """Add one finished group. It is safe on disk once its shard is written: when the buffered groups reach a limit
        (`ShardBuffer.due`), or at `flush`.

        Raises ValueError when this writer has the group already, when the stage is sealed, or when other weights than
        the origin's sampled the group; UserError for other columns than the stage has, and for a full disk.
        """
        self._open_for_writing()
        index = group[0].group
        if index in self._groups:
            raise ValueError(f"group {index} is in {self.directory} already")
        # The engines get weights once for each stage, so all its groups have one weight version. Asynchronous trainers
        # (prime-rl, AReaL) update engines while they sample, and mix versions in a batch.
        if self._origin and any(sample.weight_version != self._origin.updates for sample in group):
            found = sorted({str(sample.weight_version) for sample in group})
            raise ValueError(
                f"group {index} was sampled with the weights after {', '.join(found)} updates, and all groups of "
                f"{self.directory} have to be sampled with those after {self._origin.updates}"
            )
        optional = optional_columns(group)
        if self._columns is None:
            shards = self._shards()
            self._columns = tuple(pq.read_schema(self.directory / shards[0].file).names) if shards else optional
        check_same_columns(self.directory, self._columns, optional)
        self._groups.add(index)
        self._buffer.add(group)
        if self._buffer.due:
            self.flush()

    def flush(self) -> None:
        """Write the buffered groups as a shard, so that they are safe on disk."""
        if not (buffered := self._buffer.groups):
            return
        manifest = self._open_for_writing()
        # One more than the largest number, not the count of shards: after a resume has dropped damaged shards, the
        # count may be the number of an intact one.
        number = 1 + max((shard.number for shard in manifest.shards), default=-1)
        path = self.directory / shard_name(self._writer, number)
        with durable_file(path) as file:
            write_shard(file, buffered)
        groups, rows = [group[0].group for group in buffered], [len(group) for group in buffered]
        # The shard is written before the manifest that lists it. After a kill in between no manifest lists it, and its
        # groups are generated again.
        self._replace([*manifest.shards, StageShard(path.name, number, groups, rows, digest(path))])
        self._buffer = ShardBuffer()

    def seal(self, updates: int, prompts_per_update: int) -> None:
        """Write the stage in its final form, one row group for each update, and remove the shards of all writers.

        One update and a few row groups are in memory at a time. Raises ValueError when groups are missing, UserError
        when a shard is damaged or the disk is full.
        """
        self.flush()
        self._open_for_writing()
        listed = self._shards()
        groups = set(range(updates * prompts_per_update))
        if missing := sorted(groups.difference(*(shard.groups for shard in listed))):
            raise ValueError(f"{self.directory} lacks {len(missing)} groups, first {missing[:5]}: it cannot be sealed")
        shards = usable_shards(self.directory, listed, groups)
        path = self.directory / SEALED_NAME
        stored = pq.read_schema(self.directory / shards[0].file)
        schema, statistics = without_nulls(without_routes(stored)), StageStatistics()
        # Routes go into a file of their own, from which a pipeline rank can read only the layers that it replays.
        has_routes = without_routes(stored) != stored
        column = route_column(self.directory, "rollout", {})
        with (
            column.write_file() if has_routes else nullcontext((None, None)) as (append_routes, finish_routes),
            durable_file(path) as file,
            pq.ParquetWriter(file, schema, compression=COMPRESSION) as writer,
        ):
            for shard_table in update_rows(self.directory, shards, updates, prompts_per_update):
                table, routes = split_routes(shard_table)
                # One row group for each update, so that an update reads, decodes and verifies only its own bytes.
                writer.write_table(table, row_group_size=len(table))
                statistics.add(table)
                if routes and append_routes:
                    append_routes(*routes)
        row_groups, text_columns, footer = parquet_spans(path, training_columns(schema))
        sealed = SealedFile(
            path.name, updates, prompts_per_update, row_groups, text_columns, footer, statistics.result()
        )
        if finish_routes:  # the index of the routes names the stage's content, which is known only now
            finish_routes(stage_identity(sealed.content))
        # Replacing the manifest seals the stage. After a kill before it the shards are still there, to be sealed again.
        self._replace([], sealed)
        self._sealed_file = sealed
        self.remove_shards()

    def remove_shards(self) -> None:
        """Remove the shards of a sealed stage. A resumed run calls this too, in case `seal` was killed before this."""
        self._require_sealed()
        for pattern in SHARD_PATTERNS:
            for merged in self.directory.glob(pattern):
                merged.unlink()
            remove_leftovers(self.directory, pattern)

    def read_update(self, update: int, with_text: bool = False) -> list[Sample]:
        """The samples of one update of the sealed stage, groups in order; only that update's bytes are read and
        verified.

        They have what training needs, and with `with_text` also `schema.TEXT_COLUMNS`. Raises UserError when the bytes
        are damaged.
        """
        sealed = self._require_sealed()
        path, layout = self.directory / sealed.file, self._checked_layout()
        # The bytes are hashed at every read: hours may lie between sealing and the last update, and training would not
        # notice a flipped bit (Parquet's own page checksums are off by default).
        spans = [sealed.row_groups[update], *([sealed.text_columns[update]] if with_text else [])]
        for span in spans:
            verify(path, span, REMEDY)
        with pq.ParquetFile(path, metadata=layout) as file:
            columns = None if with_text else training_columns(file.schema_arrow)
            table = file.read_row_group(update, columns=columns, use_threads=False)
        start = update * sealed.prompts_per_update
        check_rows(path, table, range(start, start + sealed.prompts_per_update), REMEDY)
        return with_routes(to_samples(table), self.directory, self.content, update, self.replay)

    def rewards(self) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays with an entry for each sample of the sealed stage: rewards before the overlong penalty, and
        groups.

        They are float64 [n] and int64 [n], and they are kept in memory for later calls. The first call verifies all
        bytes that training reads; UserError for damage.
        """
        if self._rewards is None:
            sealed = self._require_sealed()
            self._checked_layout()
            for span in sealed.row_groups:
                verify(self.directory / sealed.file, span, REMEDY)
            with pq.ParquetFile(self.directory / sealed.file) as file:
                table = file.read(columns=["reward", "group", "components"])
            check_rows(self.directory / sealed.file, table, range(sealed.updates * sealed.prompts_per_update), REMEDY)
            verdicts = before_penalty(table["reward"].to_numpy().astype(np.float64), penalties_of(table))
            self._rewards = verdicts, table["group"].to_numpy().astype(np.int64)
        return self._rewards

    def _checked_layout(self) -> pq.FileMetaData:
        """The sealed file's Parquet footer; UserError when it is damaged or its columns are not a stage's."""
        if self._layout is None:
            sealed = self._require_sealed()
            path = self.directory / sealed.file
            verify(path, sealed.footer, REMEDY)
            layout = pq.read_metadata(path)
            check_file(path, layout.schema.to_arrow_schema(), REMEDY)
            if layout.num_row_groups != sealed.updates:
                raise UserError(f"{path}: its row groups do not match its manifest; {REMEDY}")
            self._layout = layout
        return self._layout

    def _shards(self) -> list[StageShard]:
        """The shards in the manifests of all writers."""
        manifest = self._manifest or read_manifest(self.directory, manifest_name(self._writer))
        return [*manifest.shards, *other_shards(self.directory, self._writer)]

    def _require_sealed(self) -> SealedFile:
        if not self.sealed:
            raise ValueError(f"{self.directory} is not sealed")
        assert self._sealed_file is not None
        return self._sealed_file

    def _open_for_writing(self) -> Manifest:
        """Returns this writer's manifest. The first call also removes the writer's damaged shards and what a crash
        left."""
        if self._manifest is None and not self.sealed:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                # Otherwise a power cut may lose the new directory, and the files in it although they are on disk.
                fsync(self.directory.parent)
            except OSError as error:
                raise full_disk_error(error, self.directory) or error from error
            if self._writer:
                # Raises if this writer has shards but no manifest: these shards must not be removed as leftovers.
                check_listed(self.directory, self._writer)
            else:
                check_stage(self.directory, self._origin)
            shards = intact(self.directory, read_manifest(self.directory, manifest_name(self._writer)).shards)
            self._replace(shards)
            listed, pattern = {shard.file for shard in shards}, shard_name(self._writer, DIGITS)
            for path in self.directory.glob(pattern):
                # A file that is not listed is damaged, or its writer was killed before the manifest listed it.
                if path.name not in listed:
                    path.unlink()
            for name in (pattern, manifest_name(self._writer), *([] if self._writer else [SEALED_NAME])):
                remove_leftovers(self.directory, name)
            self._groups = {group for shard in shards for group in shard.groups}
        if self._sealed_file is not None or self._manifest is None:
            raise ValueError(f"{self.directory} is sealed: nothing can be added")
        return self._manifest

    def _replace(self, shards: list[StageShard], sealed: SealedFile | None = None) -> None:
        manifest = Manifest(shards, sealed, self._origin)
        write_manifest(self.directory, manifest, manifest_name(self._writer))
        self._manifest = manifest
