"""What the writers of a stage have left in their shards, gathered into the order of its updates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.stages.manifest import Shard, intact, verify

SHARDS_IN_MEMORY = 4
"""Decoded shards that sealing keeps: an update's groups finish at different times, so several shards hold them."""


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
    places: dict[int, tuple[Shard, int, int]] = {}
    for shard in shards:
        ends = accumulate(shard.rows)
        places.update(
            (group, (shard, end - rows, rows)) for group, rows, end in zip(shard.groups, shard.rows, ends, strict=True)
        )

    @lru_cache(maxsize=SHARDS_IN_MEMORY)
    def read(file: str) -> pa.Table:
        return pq.read_table(directory / file, use_threads=False)

    for update in range(updates):
        rows = []
        for group in range(update * prompts_per_update, (update + 1) * prompts_per_update):
            shard, start, length = places[group]
            rows.append(read(shard.file).slice(start, length))
        yield pa.concat_tables(rows).combine_chunks()
