"""Merges the shards of a stage's writers into the order of its updates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.stages.manifest import Shard, intact, verify

ROW_GROUPS_IN_MEMORY = 32
"""Decoded row groups that sealing keeps: an update's groups finish at different times, so several hold them."""


def covering(directory: Path, shards: list[Shard], wanted: set[int]) -> list[Shard]:
    """The intact shards; UserError when a damaged shard holds a group that no intact one holds."""
    whole = intact(directory, shards)
    lost = wanted.difference(*(shard.groups for shard in whole))
    for shard in shards:
        if lost.intersection(shard.groups):
            verify(directory / shard.file, shard.whole, "run the same command again to generate its groups again")
    return whole


def in_order(directory: Path, shards: list[Shard], updates: int, prompts_per_update: int) -> Iterator[pa.Table]:
    """Each update's rows, groups in order, gathered from the shards."""
    shard_of = {group: shard for shard in shards for group in shard.groups}
    places = {shard.file: _places(directory / shard.file, shard) for shard in shards}

    @lru_cache(maxsize=ROW_GROUPS_IN_MEMORY)
    def read(file: str, row_group: int) -> pa.Table:
        with pq.ParquetFile(directory / file) as shard:
            return shard.read_row_group(row_group, use_threads=False)

    for update in range(updates):
        rows = []
        for group in range(update * prompts_per_update, (update + 1) * prompts_per_update):
            file = shard_of[group].file
            row_group, start, length = places[file][group]
            rows.append(read(file, row_group).slice(start, length))
        yield pa.concat_tables(rows).combine_chunks()


def _places(path: Path, shard: Shard) -> dict[int, tuple[int, int, int]]:
    """The row group, first row and number of rows of each group; no group is in two row groups."""
    layout = pq.read_metadata(path)
    begins = [0, *accumulate(layout.row_group(i).num_rows for i in range(layout.num_row_groups))]
    found = {}
    for group, rows, end in zip(shard.groups, shard.rows, accumulate(shard.rows), strict=True):
        row_group = bisect_right(begins, end - rows) - 1
        found[group] = (row_group, end - rows - begins[row_group], rows)
    return found
