"""A writer's shard: its pending groups, and its file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import IO, Final

import pyarrow.parquet as pq

from mugrpo_megatron.samples import HeldRoutes, Sample
from mugrpo_megatron.stages.routes import add_routes
from mugrpo_megatron.stages.schema import to_table

SHARD_TOKENS = 1 << 20
SHARD_RESPONSES = 4096
SHARD_ROUTES = 1 << 27
SHARD_SECONDS = 10.0
"""A shard is written when it has this many tokens, responses or bytes of routes, or its oldest group has waited so
long."""
ROW_GROUP_TOKENS = 1 << 14
"""Groups go into one row group of the file until they have this many tokens: what sealing reads at once."""
COMPRESSION: Final = "zstd"


@dataclass
class Waiting:
    """Groups that no shard holds yet."""

    groups: list[list[Sample]] = field(default_factory=list)
    tokens: int = 0
    responses: int = 0
    routes: int = 0
    """Bytes."""
    since: float = 0.0

    def add(self, group: list[Sample]) -> None:
        if not self.groups:
            self.since = time.monotonic()
        self.groups.append(group)
        self.tokens += _tokens(group)
        self.responses += len(group)
        self.routes += sum(one.routes.experts.nbytes for one in group if isinstance(one.routes, HeldRoutes))

    @property
    def due(self) -> bool:
        full = self.tokens >= SHARD_TOKENS or self.responses >= SHARD_RESPONSES or self.routes >= SHARD_ROUTES
        return full or time.monotonic() - self.since >= SHARD_SECONDS


def write_shard(file: IO[bytes], groups: Sequence[list[Sample]]) -> None:
    """Write one group or more as Parquet, no group in two row groups."""
    tables = (add_routes(to_table(samples), samples) for samples in _parts(groups))
    first = next(tables)
    with pq.ParquetWriter(file, first.schema, compression=COMPRESSION) as writer:
        for table in chain([first], tables):
            writer.write_table(table, row_group_size=len(table))


def _parts(groups: Sequence[list[Sample]]) -> Iterator[list[Sample]]:
    part: list[Sample] = []
    size = 0
    for group in groups:
        tokens = _tokens(group)
        if part and size + tokens > ROW_GROUP_TOKENS:
            yield part
            part, size = [], 0
        part.extend(group)
        size += tokens
    yield part


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.tokens for sample in samples)
