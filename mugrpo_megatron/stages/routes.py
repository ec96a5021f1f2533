"""The experts of a stage's tokens in a file next to it, of which a rank reads only the parts that it replays.

    stages/00003/routes.bin     the engine's: of update after update layer 0 of all its tokens, layer 1, ..., checksums
    stages/00003/routes.json    which stage they belong to, and where each update's part begins
    stages/00003/learner_routes.bin, learner_routes.json    the learner's, in the same form

A choice is one byte, or two where a layer has more than 256 experts. This is not Parquet, because a rank reads single
layers and responses at known places, and choices hardly compress. An update's part ends with one CRC-32 for each layer
of each response; the SHA-256 of these checksums is in the JSON file, which is written last. In a stage's shards the
engine's routes are a column.
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
from mugrpo_megatron.stages.columns import Column, computed_again
from mugrpo_megatron.stages.manifest import stage_identity

NAMES = {"rollout": "routes.bin", "learner": "learner_routes.bin"}
"""By whose routers chose: the engine's, which sampled the tokens, or the learner's before the stage's first update."""
REPAIRS = {
    "rollout": "restore both of its files from a copy, or remove the stage's directory to generate the stage again "
    'with learner.routing_replay = "rollout"',
    "learner": computed_again("inside this stage"),
}

Append = Callable[[Sequence[int], Iterable[np.ndarray]], None]
"""(tokens with routes of each response, each layer's experts [T, k] of all of them)."""


@dataclass(frozen=True, slots=True)
class RouteSpan:
    """Where the routes of one update lie."""

    start: int
    tokens: int
    """T, of all responses."""
    responses: int
    sums: str
    """SHA-256 of the CRC-32 of each layer of each response."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is the same for all updates of a stage."""

    layers: int
    chosen: int
    """Experts of a token in a layer."""
    width: int
    """Bytes of a choice."""

    @property
    def token(self) -> int:
        """Bytes of a token in one layer."""
        return self.chosen * self.width


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """One response's routes in the file; reads the layers that it is asked for."""

    path: Path
    shape: Shape
    start: int
    """Of the response in layer 0."""
    stride: int
    """Bytes from a layer to the next."""
    tokens: int
    sums: np.ndarray
    """uint32 [layers]"""
    repair: str

    def read(self, layers: Sequence[int]) -> np.ndarray:
        """uint8 or uint16 [len(layers), tokens, k]; UserError when its bytes are damaged."""
        size, kind = self.tokens * self.shape.token, np.dtype(f"<u{self.shape.width}")
        experts = np.empty((len(layers), self.tokens, self.shape.chosen), dtype=kind)
        with self.path.open("rb", buffering=0) as file:
            for place, layer in enumerate(layers):
                block = os.pread(file.fileno(), size, self.start + layer * self.stride)
                if len(block) != size or zlib.crc32(block) != self.sums[layer]:
                    raise UserError(
                        f"{self.path}: damaged, layer {layer} of a response has another checksum; {self.repair}"
                    )
                experts[place] = np.frombuffer(block, kind).reshape(self.tokens, self.shape.chosen)
        return experts


class RouteColumn(Column):
    """The routes of a stage's responses."""

    name = "routes"

    @contextmanager
    def write(self, enabled: bool = True) -> Iterator[Append]:
        """Yield a function that appends one update's routes; the column is whole or absent.

        `of` is read at the end of the block. `enabled` is true on one rank; on the others the function only goes
        through the layers. Memory holds one layer of one update.
        """
        if not enabled:
            yield _pass
            return
        self.begin()
        parts: list[RouteSpan] = []
        shapes: set[Shape] = set()
        with durable_file(self.path) as file:

            def append(lengths: Sequence[int], layers: Iterable[np.ndarray]) -> None:
                start, ends = file.tell(), np.cumsum(lengths)
                sums = []
                for experts in layers:
                    shape = experts.shape[1], experts.dtype.itemsize
                    little = experts.astype(f"<u{shape[1]}", copy=False)
                    file.write(little.tobytes())
                    sums.append([zlib.crc32(part.tobytes()) for part in np.split(little, ends[:-1])])
                table = np.array(sums, dtype="<u4").tobytes()
                file.write(table)
                shapes.add(Shape(len(sums), *shape))
                parts.append(RouteSpan(start, int(ends[-1]), len(lengths), hashlib.sha256(table).hexdigest()))

            yield append
        (shape,) = shapes
        self.finish({**asdict(shape), "updates": [asdict(part) for part in parts]})

    def read(self, update: int, lengths: Sequence[int]) -> list[StoredRoutes]:
        """The routes of an update's responses, which have `lengths` tokens with routes; reads only their checksums.

        Raises UserError, ending with `repair`, when a file is missing or damaged, or belongs to something else.
        """
        body = self.body()
        try:
            shape, part = Shape(body["layers"], body["chosen"], body["width"]), RouteSpan(**body["updates"][update])
        except (KeyError, TypeError, IndexError):
            raise UserError(f"{self.index}: damaged, so {self.path.name} cannot be read; {self.repair}") from None
        if (part.tokens, part.responses) != (sum(lengths), len(lengths)):
            raise UserError(f"{self.path}: of other responses or of another policy than the run's; {self.repair}")
        stride = part.tokens * shape.token
        try:
            with self.path.open("rb", buffering=0) as file:
                table = os.pread(file.fileno(), 4 * shape.layers * len(lengths), part.start + shape.layers * stride)
        except OSError:
            raise UserError(f"{self.path}: missing, but {self.index.name} is there; {self.repair}") from None
        if hashlib.sha256(table).hexdigest() != part.sums:
            raise UserError(
                f"{self.path}: damaged, the checksums of update {update} are not those that were written; {self.repair}"
            )
        sums = np.frombuffer(table, "<u4").reshape(shape.layers, -1)
        starts = part.start + shape.token * (np.cumsum(lengths) - lengths)
        return [
            StoredRoutes(self.path, shape, int(start), stride, tokens, sums[:, place], self.repair)
            for place, (start, tokens) in enumerate(zip(starts, lengths, strict=True))
        ]


def _pass(lengths: Sequence[int], layers: Iterable[np.ndarray]) -> None:
    for _ in layers:  # the layers come from a collective
        pass


def route_column(directory: Path, by: Replay, of: Mapping[str, Any]) -> RouteColumn:
    """The routes of the stage in `directory`, by whose routers chose."""
    return RouteColumn(directory / NAMES[by], of, REPAIRS[by])


def with_routes(samples: list[Sample], directory: Path, content: str, update: int, replay: Replay) -> list[Sample]:
    """The samples of an update of the stage of this `content`, with the routes that they replay, read when asked for.

    Without routes where nothing is replayed, and before the learner has recorded any. Raises UserError when their file
    is damaged, or the stage has none of the engine's.
    """
    if replay == "off":
        return samples
    column = route_column(directory, replay, stage_identity(content))
    if replay == "learner" and not column.complete:
        return samples
    routes = column.read(update, [sample.tokens - 1 for sample in samples])
    return [replace(sample, routes=each) for sample, each in zip(samples, routes, strict=True)]


COLUMN = "routes"
SIZES = ("layers", "chosen", "width")
"""Field metadata: layers, experts of a token in each, bytes of a choice."""

UpdateRoutes = tuple[list[int], Iterator[np.ndarray]]
"""Tokens with routes of each response, and each layer's experts [T, k] of all of them."""


def add_routes(table: pa.Table, samples: Sequence[Sample]) -> pa.Table:
    """The samples' table with their routes, if they have any, each as the bytes of uint8 or uint16 [L, n, k]."""
    routes = [sample.routes for sample in samples]
    if not any(routes):
        return table
    experts = [one.experts for one in routes if isinstance(one, InMemoryRoutes)]
    if len(experts) < len(routes):
        raise ValueError("all samples of a stage have the engine's routes, or none")
    (layers, _, chosen), width = experts[0].shape, experts[0].dtype.itemsize
    metadata = dict(zip(SIZES, map(str, (layers, chosen, width)), strict=True))
    field = pa.field(COLUMN, pa.large_binary(), nullable=False, metadata=metadata)
    values = [one.astype(f"<u{width}", copy=False).tobytes() for one in experts]
    return table.append_column(field, pa.array(values, pa.large_binary()))


def without_routes(schema: pa.Schema) -> pa.Schema:
    """The schema of the sealed stage."""
    return schema.remove(schema.get_field_index(COLUMN)) if COLUMN in schema.names else schema


def take_routes(table: pa.Table) -> tuple[pa.Table, UpdateRoutes | None]:
    """An update's table without its routes, and the routes."""
    if COLUMN not in table.schema.names:
        return table, None
    layers, chosen, width = (int(table.schema.field(COLUMN).metadata[name.encode()]) for name in SIZES)
    cells = [np.frombuffer(value.as_buffer(), f"<u{width}") for value in table[COLUMN]]
    parts = [cell.reshape(layers, -1, chosen) for cell in cells]
    each = (np.concatenate([experts[layer] for experts in parts]) for layer in range(layers))
    return table.drop_columns([COLUMN]), ([experts.shape[1] for experts in parts], each)
