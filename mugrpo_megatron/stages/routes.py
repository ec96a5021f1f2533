"""The experts of a stage's tokens, in a file beside it; a rank reads only the layers and responses that it replays.

    stages/00003/routes.bin     the engine's: for each update layer 0 of all its tokens, layer 1, ..., checksums
    stages/00003/routes.json    the stage's identity, and where each update's bytes are
    stages/00003/learner_routes.bin, learner_routes.json    the learner's, in the same form

A choice of an expert is one byte, or two where a layer has more than 256 experts. The file is not Parquet, because a
rank reads single layers and responses at known offsets, and choices hardly compress. An update's bytes end with one
CRC-32 for each layer of each response; the SHA-256 of these checksums is in the JSON file, which is written last. Until
the stage is sealed, the engine's routes are a column of its shards.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import durable_file
from mugrpo_megatron.recipe.systems import Replay
from mugrpo_megatron.samples import InMemoryRoutes, Sample
from mugrpo_megatron.stages.columns import Column, recompute_remedy
from mugrpo_megatron.stages.manifest import stage_identity

FILE_NAMES = {"rollout": "routes.bin", "learner": "learner_routes.bin"}
"""Whose routers chose the experts -> file. `rollout`: the engine's, while it sampled; `learner`: the learner's, before
the stage's first update."""
REMEDIES = {
    "rollout": "restore both files of the column from a copy, or remove the stage's directory to generate the stage "
    'again with learner.routing_replay = "rollout"',
    "learner": recompute_remedy("inside this stage"),
}

Append = Callable[[Sequence[int], Iterable[np.ndarray]], None]
"""Function that appends an update's routes. Its arguments are the number of tokens with routes of each response and,
for each layer, the experts of all T tokens, uint8 or uint16 [T, k]."""


@dataclass(frozen=True, slots=True)
class RouteSpan:
    """Where one update's routes begin in the file, how many there are, and their checksum."""

    start: int
    tokens: int
    """Number of tokens with routes, over all responses of the update."""
    responses: int
    sums: str
    """SHA-256 over the CRC-32 checksums of the update's routes."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    layers: int
    topk: int
    """Number of experts that a token has in a layer (Megatron's `moe_router_topk`)."""
    width: int
    """Bytes of an expert's index: 1, or 2 above 256 experts."""

    @property
    def token(self) -> int:
        """Bytes of a token's routes in one layer."""
        return self.topk * self.width


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """The place of one response's routes in the file, from which single layers are read."""

    path: Path
    shape: RouteShape
    start: int
    """Offset in the file, in bytes, of the response's routes in layer 0."""
    stride: int
    """Bytes between the beginnings of two layers in the file."""
    tokens: int
    sums: np.ndarray
    """uint32 [layers]: CRC-32 of the response's routes in each layer."""
    remedy: str

    def read(self, layers: Sequence[int]) -> np.ndarray:
        """Returns the experts in these layers, uint8 or uint16 [len(layers), tokens, k]; UserError when their bytes are
        damaged."""
        size, kind = self.tokens * self.shape.token, np.dtype(f"<u{self.shape.width}")
        experts = np.empty((len(layers), self.tokens, self.shape.topk), dtype=kind)
        with self.path.open("rb", buffering=0) as file:
            for index, layer in enumerate(layers):
                block = os.pread(file.fileno(), size, self.start + layer * self.stride)
                if len(block) != size or zlib.crc32(block) != self.sums[layer]:
                    raise UserError(
                        f"{self.path}: damaged, since a response's layer {layer} does not have the recorded checksum; "
                        f"{self.remedy}"
                    )
                experts[index] = np.frombuffer(block, kind).reshape(self.tokens, self.shape.topk)
        return experts


class RouteColumn(Column):
    name = "routes"

    @contextmanager
    def write(self, enabled: bool = True) -> Iterator[Append]:
        """Yield a function that appends the routes of one update; the column is complete once the block ends.

        `enabled` is true on one rank; on the others the function only iterates over the layers. The function has one
        layer of one update in memory at a time.
        """
        if not enabled:
            yield _drain
            return
        with self.write_file() as (append, finish):
            yield append
        finish(self.identity)

    @contextmanager
    def write_file(self) -> Iterator[tuple[Append, Callable[[Mapping[str, Any]], None]]]:
        """Yield a function that appends the routes of one update, and one that completes the column.

        Call the second after the block, with the column's identity. So a writer need not know before the end which
        stage the column belongs to.
        """
        self.begin()
        spans: list[RouteSpan] = []
        shapes: set[RouteShape] = set()
        with durable_file(self.path) as file:

            def append(lengths: Sequence[int], layers: Iterable[np.ndarray]) -> None:
                start, ends = file.tell(), np.cumsum(lengths)
                sums = []
                for experts in layers:
                    shape = experts.shape[1], experts.dtype.itemsize
                    little = experts.astype(f"<u{shape[1]}", copy=False)
                    file.write(little.tobytes())
                    sums.append([zlib.crc32(block.tobytes()) for block in np.split(little, ends[:-1])])
                table = np.array(sums, dtype="<u4").tobytes()
                file.write(table)
                shapes.add(RouteShape(len(sums), *shape))
                spans.append(RouteSpan(start, int(ends[-1]), len(lengths), hashlib.sha256(table).hexdigest()))

            def finish(identity: Mapping[str, Any]) -> None:
                (shape,) = shapes
                body = {**asdict(shape), "updates": [asdict(span) for span in spans]}
                replace(self, identity=identity).finish(body)

            yield append, finish

    def read(self, update: int, lengths: Sequence[int]) -> list[StoredRoutes]:
        """Where the routes of an update's responses are in the file; the routes themselves are not read yet.

        `lengths` is the number of tokens with routes of each response. Raises UserError that ends with `remedy` when a
        file is missing or damaged, or when the column has another identity.
        """
        body = self.body()
        try:
            shape, span = RouteShape(body["layers"], body["topk"], body["width"]), RouteSpan(**body["updates"][update])
        except (KeyError, TypeError, IndexError):
            raise UserError(f"{self.index}: damaged, so {self.path.name} cannot be read; {self.remedy}") from None
        if (span.tokens, span.responses) != (sum(lengths), len(lengths)):
            raise UserError(f"{self.path}: was computed for other responses or another policy; {self.remedy}")
        stride = span.tokens * shape.token
        try:
            with self.path.open("rb", buffering=0) as file:
                table = os.pread(file.fileno(), 4 * shape.layers * len(lengths), span.start + shape.layers * stride)
        except OSError:
            raise UserError(
                f"{self.path}: missing or unreadable, but {self.index.name} is there; {self.remedy}"
            ) from None
        if hashlib.sha256(table).hexdigest() != span.sums:
            raise UserError(
                f"{self.path}: damaged, since the checksums of update {update} do not match the index; {self.remedy}"
            )
        sums = np.frombuffer(table, "<u4").reshape(shape.layers, -1)
        starts = span.start + shape.token * (np.cumsum(lengths) - lengths)
        return [
            StoredRoutes(self.path, shape, int(start), stride, tokens, sums[:, index], self.remedy)
            for index, (start, tokens) in enumerate(zip(starts, lengths, strict=True))
        ]


def _drain(lengths: Sequence[int], layers: Iterable[np.ndarray]) -> None:
    # The iterator must be exhausted: each layer comes from a collective, which hangs unless every rank takes part.
    for _ in layers:
        pass


def route_column(directory: Path, routers: Replay, identity: Mapping[str, Any]) -> RouteColumn:
    """The column of the routes that the engine's or the learner's routers (`routers`) chose for the stage in
    `directory`."""
    return RouteColumn(directory / FILE_NAMES[routers], identity, REMEDIES[routers])


def with_routes(samples: list[Sample], directory: Path, content: str, update: int, replay: Replay) -> list[Sample]:
    """Add to the samples of an update the routes that training replays; these are read only when they are needed.

    `content` is the stage's checksum. Nothing is added if `replay` is "off", or if it is "learner" and the learner has
    not recorded its routes yet. Raises UserError when the file of the routes is damaged, or when the engine's routes
    are missing.
    """
    if replay == "off":
        return samples
    column = route_column(directory, replay, stage_identity(content))
    if replay == "learner" and not column.complete:
        return samples
    # Each sample's last token has no routes, since it is never an input of the model.
    routes = column.read(update, [sample.tokens - 1 for sample in samples])
    return [replace(sample, routes=stored) for sample, stored in zip(samples, routes, strict=True)]


COLUMN = "routes"
SIZES = ("layers", "topk", "width")
"""Keys in the metadata of a shard's column of routes: the fields of `RouteShape`."""

UpdateRoutes = tuple[list[int], Iterator[np.ndarray]]
"""An update's routes, as the arguments of `Append`."""


def append_routes(table: pa.Table, samples: Sequence[Sample]) -> pa.Table:
    """The samples' table with their routes as one more column; unchanged if they have none.

    A value of the column is the bytes of uint8 or uint16 [layers, tokens, k]. Raises ValueError if only some samples
    have routes.
    """
    routes = [sample.routes for sample in samples]
    if not any(routes):
        return table
    experts = [response.experts for response in routes if isinstance(response, InMemoryRoutes)]
    if len(experts) < len(routes):
        raise ValueError(
            f"{len(experts)} of {len(routes)} samples have the engine's routes; all samples of a stage must have "
            "them, or none"
        )
    (layers, _, topk), width = experts[0].shape, experts[0].dtype.itemsize
    metadata = dict(zip(SIZES, map(str, (layers, topk, width)), strict=True))
    field = pa.field(COLUMN, pa.large_binary(), nullable=False, metadata=metadata)
    values = [array.astype(f"<u{width}", copy=False).tobytes() for array in experts]
    return table.append_column(field, pa.array(values, pa.large_binary()))


def without_routes(schema: pa.Schema) -> pa.Schema:
    """The schema without the column of routes: a sealed stage has them in a file of their own."""
    return schema.remove(schema.get_field_index(COLUMN)) if COLUMN in schema.names else schema


def split_routes(table: pa.Table) -> tuple[pa.Table, UpdateRoutes | None]:
    """Returns an update's table without the column of routes, and the routes; None in their place if there are none."""
    if COLUMN not in table.schema.names:
        return table, None
    layers, topk, width = (int(table.schema.field(COLUMN).metadata[name.encode()]) for name in SIZES)
    cells = [np.frombuffer(value.as_buffer(), f"<u{width}") for value in table[COLUMN]]
    responses = [cell.reshape(layers, -1, topk) for cell in cells]
    by_layer = (np.concatenate([experts[layer] for experts in responses]) for layer in range(layers))
    return table.drop_columns([COLUMN]), ([experts.shape[1] for experts in responses], by_layer)
