"""The durable stage: generation writes it, optimization reads it; the only interface between the two.

    stages/00003/manifest.json      what is complete, with checksums; replaced as the last step of every change
    stages/00003/shard-00000.parquet ...   groups in order of completion; removed once the stage is sealed
    stages/00003/manifest-0002.json, shard-0002-00000.parquet ...   the same of writer 2, where several engines generate
    stages/00003/stage.parquet      the sealed stage: row group k is update k, its groups in order

Each file has one writer; any number of processes may read. The schema is in `schema.py`.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import digest, durable_file, fsync, full_disk_error, remove_leftovers
from mugrpo_megatron.recipe.systems import Replay
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.manifest import (
    DIGITS,
    MERGED,
    SEALED_NAME,
    Manifest,
    Origin,
    Sealed,
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
from mugrpo_megatron.stages.routes import route_column, take_routes, with_routes, without_routes
from mugrpo_megatron.stages.schema import (
    COMPRESSION,
    StageStatistics,
    Waiting,
    check_file,
    check_rows,
    check_same_columns,
    optional_columns,
    to_samples,
    training_columns,
    write_shard,
)

ROW_GROUPS_IN_MEMORY = 32
"""Decoded row groups that sealing keeps: an update's groups finish at different times, so several hold them."""


def covering(directory: Path, shards: list[StageShard], groups: set[int]) -> list[StageShard]:
    """The intact shards; UserError when a damaged shard holds a group that no intact one holds."""
    whole = intact(directory, shards)
    lost = groups.difference(*(shard.groups for shard in whole))
    for shard in shards:
        if lost.intersection(shard.groups):
            verify(directory / shard.file, shard.span, "run the same command again to generate its groups again")
    return whole


def in_order(directory: Path, shards: list[StageShard], updates: int, prompts_per_update: int) -> Iterator[pa.Table]:
    """Each update's rows, groups in order, gathered from the shards."""
    shard_of = {group: shard for shard in shards for group in shard.groups}
    places = {shard.file: _places(directory / shard.file, shard) for shard in shards}

    @lru_cache(maxsize=ROW_GROUPS_IN_MEMORY)
    def read(file: str, row_group: int) -> pa.Table:
        with pq.ParquetFile(directory / file) as shard:
            return shard.read_row_group(row_group, use_threads=False)

    for update in range(updates):
        rows = []
        groups = range(update * prompts_per_update, (update + 1) * prompts_per_update)
        for group in groups:
            file = shard_of[group].file
            row_group, start, length = places[file][group]
            rows.append(read(file, row_group).slice(start, length))
        table = pa.concat_tables(rows).combine_chunks()
        check_rows(directory, table, groups, REMEDY)
        yield table


def _places(path: Path, shard: StageShard) -> dict[int, tuple[int, int, int]]:
    """The row group, first row and number of rows of each group; no group is in two row groups."""
    layout = pq.read_metadata(path)
    check_file(path, without_routes(layout.schema.to_arrow_schema()), REMEDY)
    begins = [0, *accumulate(layout.row_group(i).num_rows for i in range(layout.num_row_groups))]
    places = {}
    for group, rows, end in zip(shard.groups, shard.rows, accumulate(shard.rows), strict=True):
        row_group = bisect_right(begins, end - rows) - 1
        if end > begins[-1] or end > begins[row_group + 1]:
            raise UserError(f"{path}: it has other rows than its manifest lists; {REMEDY}")
        places[group] = (row_group, end - rows - begins[row_group], rows)
    return places


VISIBLE_SECONDS = 20.0
"""Longest delay until a shared file system shows one node what another has written."""
REMEDY = "restore it from a copy, or remove the stage's directory to generate the stage again"


class StageStore:
    """The responses of one stage on disk, in `directory`.

    Several processes may append, each with its own `writer` number and its own groups: the prompt queue gives a group
    to one engine only. Writer 0 seals what all of them wrote, once all have finished writing.
    """

    def __init__(self, directory: Path, writer: int = 0, origin: Origin | None = None, replay: Replay = "off") -> None:
        """`origin` is written into the manifest, and must be that of a stage that exists already.

        `replay` says which routes the samples that are read come with (`learner.routing_replay`).
        """
        self.directory, self.replay = directory, replay
        self._writer, self._origin = writer, origin
        self._waiting = Waiting()
        self._groups: set[int] = set()
        """While this store writes: every group that it holds, on disk or buffered."""
        self._columns: tuple[str, ...] | None = None
        """While this store writes: the columns of its groups, once there is one; at least the optional ones."""
        self._own: Manifest | None = None
        """Set once this store writes: from then on only this store changes its writer's manifest."""
        self._final: Sealed | None = None
        """Set once the stage was found sealed: it does not change any more."""
        self._layout: pq.FileMetaData | None = None
        self._rewards: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def sealed(self) -> bool:
        """Whether every group is on disk in its final place."""
        if self._final is None and (self._own is None or self._writer):
            manifest = read_manifest(self.directory)
            check_origin(self.directory, manifest, self._origin)
            self._final = manifest.sealed
        return self._final is not None

    @property
    def updates(self) -> int:
        """Updates that the sealed stage holds the responses of."""
        return self._sealed().updates

    @property
    def content(self) -> str:
        """A digest of the sealed stage's responses: the same for the same bytes, wherever they lie."""
        return self._sealed().content

    @property
    def file(self) -> str:
        """The name of the sealed stage's file."""
        return self._sealed().file

    def verify(self) -> None:
        """Raise UserError unless every byte of the sealed stage has its checksum."""
        sealed = self._sealed()
        self._checked_layout()
        for span in (*sealed.row_groups, *sealed.text_columns):
            verify(self.directory / sealed.file, span, REMEDY)

    def statistics(self) -> dict[str, float]:
        """The sealed stage's metrics, as `schema.StageStatistics` defines them."""
        return self._sealed().statistics

    def verified_groups(self) -> set[int]:
        """Indices of the groups that are intact on disk; damaged shards are logged and left out.

        Groups that `append` still buffers do not count, so a resumed stage generates exactly what is missing.
        """
        if self.sealed:
            return set(range(self._sealed().updates * self._sealed().prompts_per_update))
        return {group for shard in intact(self.directory, self._shards()) for group in shard.groups}

    def listed_groups(self) -> set[int]:
        """Indices of the groups that the manifests list: `present` without reading the shards."""
        return {group for shard in self._shards() for group in shard.groups}

    @property
    def own_groups(self) -> set[int]:
        """This writer's groups, on disk or buffered; empty until it writes."""
        return set(self._groups)

    def wait_for(self, groups: set[int], sealed: bool) -> bool:
        """Wait until `groups`, or the sealed stage, are visible; False after VISIBLE_SECONDS.

        A shared file system may show late what other processes have written.
        """
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not (self.sealed if sealed else self.listed_groups() >= groups):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def append(self, group: list[Sample]) -> None:
        """Add one finished group; it is durable once its shard is written: when full or old enough, or at `flush`.

        Raises ValueError when this writer has the group already or the stage is sealed, UserError for a full disk.
        """
        self._open_for_writing()
        index = group[0].group
        if index in self._groups:
            raise ValueError(f"group {index} is in {self.directory} already")
        if self._origin and any(sample.weight_version != self._origin.updates for sample in group):
            raise ValueError(f"group {index} was not sampled after {self._origin.updates} updates: {self.directory}")
        self._check_columns(optional_columns(group))
        self._groups.add(index)
        self._waiting.add(group)
        if self._waiting.due:
            self.flush()

    def flush(self) -> None:
        """Write the buffered groups as a shard, durably."""
        waiting = self._waiting.groups
        if not waiting:
            return
        manifest = self._open_for_writing()
        number = 1 + max((shard.number for shard in manifest.shards), default=-1)
        path = self.directory / shard_name(self._writer, number)
        with durable_file(path) as file:
            write_shard(file, waiting)
        groups, rows = [group[0].group for group in waiting], [len(group) for group in waiting]
        self._replace([*manifest.shards, StageShard(path.name, number, groups, rows, digest(path))])
        self._waiting = Waiting()

    def seal(self, updates: int, prompts_per_update: int) -> None:
        """Write the stage in its final form, one row group per update, and remove the shards of all writers.

        Streams: memory holds one update and a few row groups, whatever the stage's size. Raises ValueError when groups
        are missing, UserError when a shard is damaged or the disk is full.
        """
        self.flush()
        self._open_for_writing()
        named = self._shards()
        groups = set(range(updates * prompts_per_update))
        if missing := sorted(groups.difference(*(shard.groups for shard in named))):
            raise ValueError(f"{self.directory} lacks {len(missing)} groups, first {missing[:5]}: it cannot be sealed")
        shards = covering(self.directory, named, groups)
        path = self.directory / SEALED_NAME
        stored = pq.read_schema(self.directory / shards[0].file)
        schema, of = without_routes(stored), dict[str, str]()
        statistics = StageStatistics()
        with route_column(self.directory, "rollout", of).write(stored != schema) as append_routes:
            with durable_file(path) as file, pq.ParquetWriter(file, schema, compression=COMPRESSION) as writer:
                for whole in in_order(self.directory, shards, updates, prompts_per_update):
                    table, routes = take_routes(whole)
                    writer.write_table(table, row_group_size=len(table))
                    statistics.add(table)
                    if routes:
                        append_routes(*routes)
            row_groups, other, footer = parquet_spans(path, training_columns(schema))
            final = Sealed(path.name, updates, prompts_per_update, row_groups, other, footer, statistics.result())
            of |= stage_identity(final.content)
        self._replace([], final)
        self._final = final
        self.remove_merged()

    def remove_merged(self) -> None:
        """Remove the shards of a sealed stage, which a writer that was killed after sealing has left."""
        self._sealed()
        for pattern in MERGED:
            for merged in self.directory.glob(pattern):
                merged.unlink()
            remove_leftovers(self.directory, pattern)

    def read_update(self, update: int, whole: bool = False) -> list[Sample]:
        """The samples of one update of the sealed stage, groups in order; reads and verifies only their bytes.

        They are what training needs, or `whole`. Raises UserError when their bytes are damaged.
        """
        sealed = self._sealed()
        path, layout = self.directory / sealed.file, self._checked_layout()
        spans = (sealed.row_groups[update], sealed.text_columns[update]) if whole else (sealed.row_groups[update],)
        for span in spans:
            verify(path, span, REMEDY)
        with pq.ParquetFile(path, metadata=layout) as file:
            columns = None if whole else training_columns(file.schema_arrow)
            table = file.read_row_group(update, columns=columns, use_threads=False)
        start = update * sealed.prompts_per_update
        check_rows(path, table, range(start, start + sealed.prompts_per_update), REMEDY)
        return with_routes(to_samples(table), self.directory, self.content, update, self.replay)

    def rewards(self) -> tuple[np.ndarray, np.ndarray]:
        """Rewards float64 [n] and groups int64 [n] of the sealed stage's samples.

        Keeps only these two columns in memory. The first call verifies what training reads: UserError for damage.
        """
        if self._rewards is None:
            sealed = self._sealed()
            self._checked_layout()
            for span in sealed.row_groups:
                verify(self.directory / sealed.file, span, REMEDY)
            with pq.ParquetFile(self.directory / sealed.file) as file:
                table = file.read(columns=["reward", "group"])
            check_rows(self.directory / sealed.file, table, range(sealed.updates * sealed.prompts_per_update), REMEDY)
            columns = table["reward"].to_numpy(), table["group"].to_numpy()
            self._rewards = columns[0].astype(np.float64), columns[1].astype(np.int64)
        return self._rewards

    def _checked_layout(self) -> pq.FileMetaData:
        """The sealed file's layout; UserError when it is damaged or not that of a stage."""
        if self._layout is None:
            sealed = self._sealed()
            path = self.directory / sealed.file
            verify(path, sealed.footer, REMEDY)
            layout = pq.read_metadata(path)
            check_file(path, layout.schema.to_arrow_schema(), REMEDY)
            if layout.num_row_groups != sealed.updates:
                raise UserError(f"{path}: it has other updates than its manifest lists; {REMEDY}")
            self._layout = layout
        return self._layout

    def _shards(self) -> list[StageShard]:
        """The shards that the manifests of all writers list."""
        own = self._own or read_manifest(self.directory, manifest_name(self._writer))
        return [*own.shards, *other_shards(self.directory, self._writer)]

    def _sealed(self) -> Sealed:
        if not self.sealed:
            raise ValueError(f"{self.directory} is not sealed")
        assert self._final is not None
        return self._final

    def _open_for_writing(self) -> Manifest:
        """This writer's manifest; the first call removes its damaged shards and what a crash left."""
        if self._own is None and not self.sealed:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                fsync(self.directory.parent)
            except OSError as error:
                raise full_disk_error(error, self.directory) or error from error
            if self._writer:
                check_listed(self.directory, self._writer)  # else they would be removed as leftovers
            else:
                check_stage(self.directory, self._origin)
            shards = intact(self.directory, read_manifest(self.directory, manifest_name(self._writer)).shards)
            self._replace(shards)
            self._remove_leftovers({shard.file for shard in shards})
            self._groups = {group for shard in shards for group in shard.groups}
        if self._final is not None or self._own is None:
            raise ValueError(f"{self.directory} is sealed: nothing can be added")
        return self._own

    def _check_columns(self, optional: tuple[str, ...]) -> None:
        """UserError when the stage's groups so far have other optional columns."""
        if self._columns is None:
            shards = self._shards()
            self._columns = tuple(pq.read_schema(self.directory / shards[0].file).names) if shards else optional
        check_same_columns(self.directory, self._columns, optional)

    def _remove_leftovers(self, named: set[str]) -> None:
        """Remove this writer's shards that its manifest does not list, and its temporaries."""
        shards = shard_name(self._writer, DIGITS)
        for path in self.directory.glob(shards):
            if path.name not in named:
                path.unlink()
        for name in (shards, manifest_name(self._writer), *([] if self._writer else [SEALED_NAME])):
            remove_leftovers(self.directory, name)

    def _replace(self, shards: list[StageShard], sealed: Sealed | None = None) -> None:
        own = Manifest(shards, sealed, self._origin)
        write_manifest(self.directory, own, manifest_name(self._writer))
        self._own = own
