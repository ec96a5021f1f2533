"""The durable stage: generation writes it, optimization reads it; the only interface between the two.

The life of a stage in stages/00003/. Appending and sealing end by replacing `manifest.json`, durably.

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
"""Decoded row groups that sealing keeps: an update's groups finish at different times, so several row groups hold its
rows."""
VISIBLE_SECONDS = 20.0
"""Longest delay until a shared file system shows one node what another has written."""
REMEDY = "restore it from a copy, or remove the stage's directory to generate the stage again"

RowRange = tuple[int, int, int]
"""Row group of a Parquet file, first row in it, number of rows."""


def becomes_visible(condition: Callable[[], bool]) -> bool:
    """Wait until `condition` holds on a shared file system; False after VISIBLE_SECONDS."""
    # NFS caches a directory's attributes for seconds: another node's file is durable before it can be seen here.
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def usable_shards(directory: Path, shards: list[StageShard], groups: set[int]) -> list[StageShard]:
    """The intact shards; UserError when a damaged shard holds a group that no intact shard holds."""
    usable = intact(directory, shards)
    lost = groups.difference(*(shard.groups for shard in usable))
    for shard in shards:
        if lost.intersection(shard.groups):
            verify(directory / shard.file, shard.span, "run the same command again to generate its groups again")
    return usable


def update_rows(directory: Path, shards: list[StageShard], updates: int, prompts_per_update: int) -> Iterator[pa.Table]:
    """Each update's rows, groups in order, gathered from the shards."""
    shard_of = {group: shard for shard in shards for group in shard.groups}
    row_ranges = {shard.file: _row_ranges(directory / shard.file, shard) for shard in shards}

    # Groups finish in any order, so an update's rows lie in several shards; the cache decodes each row group about once
    # and never holds the stage, which may be larger than the node's memory.
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
        # A shard that another program has written may allow nulls in any column.
        table = pa.concat_tables(rows, promote_options="default").combine_chunks()
        check_rows(directory, table, groups, REMEDY)
        yield table.cast(without_nulls(table.schema))


def _row_ranges(path: Path, shard: StageShard) -> dict[int, RowRange]:
    """The rows of each group of a shard; no group is in two row groups."""
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
    """The responses of one stage on disk, in `directory`.

    Several processes may append, each with its own `writer` number and its own groups: the prompt queue gives a group
    to one engine only. Writer 0 seals what all of them wrote, once all have finished writing.
    """

    def __init__(self, directory: Path, writer: int = 0, origin: Origin | None = None, replay: Replay = "off") -> None:
        """`origin` is written into the manifest; a stage that exists must have the same.

        `replay` chooses the routes that samples are read with (`learner.routing_replay`).
        """
        self.directory, self.replay = directory, replay
        self._writer, self._origin = writer, origin
        self._buffer = ShardBuffer()
        self._groups: set[int] = set()
        """Groups that this store has written or buffered."""
        self._columns: tuple[str, ...] | None = None
        """Names of the columns of the groups written so far (at least of the optional ones); None before the first
        group."""
        self._manifest: Manifest | None = None
        """Set once this store writes: from then on only this store changes its writer's manifest."""
        self._sealed_file: SealedFile | None = None
        """Set once the stage was found sealed, after which the stage never changes again."""
        self._layout: pq.FileMetaData | None = None
        self._rewards: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def sealed(self) -> bool:
        """Whether every group is on disk in its final place.

        A property although it may read a file: only the small manifest, and nothing once the stage was found sealed.
        """
        # Writer 0 alone seals, so its own manifest is the truth; any other process has to read it again.
        if self._sealed_file is None and (self._manifest is None or self._writer):
            manifest = read_manifest(self.directory)
            check_origin(self.directory, manifest, self._origin)
            self._sealed_file = manifest.sealed
        return self._sealed_file is not None

    @property
    def updates(self) -> int:
        """Number of updates that the sealed stage holds responses for."""
        return self._require_sealed().updates

    @property
    def content(self) -> str:
        """Digest of the sealed stage's responses; the same for the same bytes in any directory."""
        return self._require_sealed().content

    @property
    def file(self) -> str:
        return self._require_sealed().file

    def verify(self) -> None:
        """Raise UserError unless every byte of the sealed stage has its checksum."""
        sealed = self._require_sealed()
        self._checked_layout()
        for span in (*sealed.row_groups, *sealed.text_columns):
            verify(self.directory / sealed.file, span, REMEDY)

    def statistics(self) -> dict[str, float]:
        """The sealed stage's metrics, as `schema.StageStatistics` defines them."""
        return self._require_sealed().statistics

    def verified_groups(self) -> set[int]:
        """Indices of the groups that are intact on disk; damaged shards are logged and left out.

        Groups that `append` still buffers do not count, so a resumed stage generates exactly what is missing.
        """
        if self.sealed:
            return set(range(self._require_sealed().updates * self._require_sealed().prompts_per_update))
        return {group for shard in intact(self.directory, self._shards()) for group in shard.groups}

    def listed_groups(self) -> set[int]:
        """Indices of the groups that the manifests list; reads no shard."""
        return {group for shard in self._shards() for group in shard.groups}

    @property
    def own_groups(self) -> set[int]:
        """Groups that this writer has written or buffered; empty until its first append."""
        return set(self._groups)

    def wait_for(self, groups: set[int], sealed: bool) -> bool:
        """Wait until `groups`, or the sealed stage, are visible; False after VISIBLE_SECONDS."""
        return becomes_visible(lambda: self.sealed if sealed else self.listed_groups() >= groups)

    def append(self, group: list[Sample]) -> None:
        """Add one finished group; it is durable once its shard is written: when full or old enough, or at `flush`.

        Raises ValueError when this writer has the group already or the stage is sealed, UserError for a full disk.
        """
        self._open_for_writing()
        index = group[0].group
        if index in self._groups:
            raise ValueError(f"group {index} is in {self.directory} already")
        # The engines get weights once a stage, so all of it has one weight version; asynchronous trainers (prime-rl,
        # AReaL) update engines under way and mix versions in a batch.
        if self._origin and any(sample.weight_version != self._origin.updates for sample in group):
            raise ValueError(f"group {index} was not sampled after {self._origin.updates} updates: {self.directory}")
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
        """Write the buffered groups as a shard, durably."""
        if not (buffered := self._buffer.groups):
            return
        manifest = self._open_for_writing()
        # The number of shards would not do: a resume drops damaged shards, so it could be the number of an intact
        # shard.
        number = 1 + max((shard.number for shard in manifest.shards), default=-1)
        path = self.directory / shard_name(self._writer, number)
        with durable_file(path) as file:
            write_shard(file, buffered)
        groups, rows = [group[0].group for group in buffered], [len(group) for group in buffered]
        # The shard's file is durable before a manifest lists it: after a kill in between no manifest lists the file,
        # and its groups are generated again.
        self._replace([*manifest.shards, StageShard(path.name, number, groups, rows, digest(path))])
        self._buffer = ShardBuffer()

    def seal(self, updates: int, prompts_per_update: int) -> None:
        """Write the stage in its final form, one row group per update, and remove the shards of all writers.

        Streams: memory holds one update and a few row groups. Raises ValueError when groups are missing, UserError when
        a shard is damaged or the disk is full.
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
        # Routes go into a file of their own, since a pipeline rank reads the layers that it replays and no others.
        has_routes = without_routes(stored) != stored
        column = route_column(self.directory, "rollout", {})
        with (
            column.write_file() if has_routes else nullcontext((None, None)) as (append_routes, finish_routes),
            durable_file(path) as file,
            pq.ParquetWriter(file, schema, compression=COMPRESSION) as writer,
        ):
            for shard_table in update_rows(self.directory, shards, updates, prompts_per_update):
                table, routes = split_routes(shard_table)
                # One row group an update: an update reads, decodes and verifies its own bytes only.
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
        # This replacement seals the stage; a kill before it leaves the shards, and `seal` writes the file again.
        self._replace([], sealed)
        self._sealed_file = sealed
        self.remove_shards()

    def remove_shards(self) -> None:
        """Remove shards that a writer killed after sealing has left."""
        self._require_sealed()
        for pattern in SHARD_PATTERNS:
            for merged in self.directory.glob(pattern):
                merged.unlink()
            remove_leftovers(self.directory, pattern)

    def read_update(self, update: int, with_text: bool = False) -> list[Sample]:
        """The samples of one update of the sealed stage, groups in order; reads and verifies only their bytes.

        Has the columns that training needs, and `schema.TEXT_COLUMNS` with `with_text`. Raises UserError when the bytes
        are damaged.
        """
        sealed = self._require_sealed()
        path, layout = self.directory / sealed.file, self._checked_layout()
        # The bytes are hashed at every read: between sealing and the last update lie hours, and a flipped bit would be
        # trained on without a word (Parquet's own page checksums are off by default).
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
        """Rewards before the overlong penalty, float64 [n], and groups int64 [n] of the sealed stage's samples.

        Keeps only these in memory. The first call verifies what training reads: UserError for damage.
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
        """The sealed file's Parquet footer; UserError when it is damaged or has other columns than a stage."""
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
        """The shards that the manifests of all writers list."""
        manifest = self._manifest or read_manifest(self.directory, manifest_name(self._writer))
        return [*manifest.shards, *other_shards(self.directory, self._writer)]

    def _require_sealed(self) -> SealedFile:
        if not self.sealed:
            raise ValueError(f"{self.directory} is not sealed")
        assert self._sealed_file is not None
        return self._sealed_file

    def _open_for_writing(self) -> Manifest:
        """Returns this writer's manifest; the first call removes the writer's damaged shards and what a crash left."""
        if self._manifest is None and not self.sealed:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                # Without it a power cut may lose the new directory with the durable files in it.
                fsync(self.directory.parent)
            except OSError as error:
                raise full_disk_error(error, self.directory) or error from error
            if self._writer:
                # Raises for files of a writer whose manifest is missing, which would otherwise be removed as leftovers.
                check_listed(self.directory, self._writer)
            else:
                check_stage(self.directory, self._origin)
            shards = intact(self.directory, read_manifest(self.directory, manifest_name(self._writer)).shards)
            self._replace(shards)
            listed, pattern = {shard.file for shard in shards}, shard_name(self._writer, DIGITS)
            for path in self.directory.glob(pattern):
                # The file is damaged, or its writer was killed before the manifest listed it.
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
