"""The experts of a stage's tokens in a file next to it, read in just the parts that a rank replays.

    stages/00003/routes.bin     the engine's: of update after update layer 0 of all its tokens, layer 1, ..., checksums
    stages/00003/routes.json    which stage they belong to, and where each update's part begins
    stages/00003/learner_routes.bin, learner_routes.json    the learner's, in the same form

A choice is one byte, or two where a layer has more than 256 experts, so a token takes layers x chosen experts bytes:
up to a hundred times its id and log-probability. Hence no Parquet: a rank reads the layers of its pipeline stage, of
the responses of its share, at known places. Choices are close to random, so that compression would gain little.

An update's part ends with one CRC-32 for each layer of each response, so what is read is checked, and no more than that
has to be read. The SHA-256 of these checksums is in the JSON file. A file is whole once that is written.
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

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import durable_file, fsync, full_disk, read_sealed, remove_leftovers, write_sealed
from mugrpo_megatron.recipe.systems import Replay
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.manifest import of_stage

FORMAT = 1
NAMES = {"rollout": "routes.bin", "learner": "learner_routes.bin"}
"""By whose routers chose: the engine's, which sampled the tokens, or the learner's before the stage's first update."""
REMEDIES = {
    "rollout": "restore both from a copy, or remove the stage's directory to generate the stage again with "
    'learner.routing_replay = "rollout"',
    "learner": "restore both from a copy, or remove them and the checkpoints inside this stage: the run then resumes "
    "at the stage's start and records them again",
}

Append = Callable[[Sequence[int], Iterable[np.ndarray]], None]
"""(tokens with routes of each response, each layer's experts [T, k] of all of them)."""


@dataclass(frozen=True, slots=True)
class Part:
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
    remedy: str

    def read(self, layers: Sequence[int]) -> np.ndarray:
        """uint8 or uint16 [len(layers), tokens, k]; UserError when its bytes are damaged."""
        size, kind = self.tokens * self.shape.token, np.dtype(f"<u{self.shape.width}")
        found = np.empty((len(layers), self.tokens, self.shape.chosen), dtype=kind)
        with self.path.open("rb", buffering=0) as file:
            for place, layer in enumerate(layers):
                block = os.pread(file.fileno(), size, self.start + layer * self.stride)
                if len(block) != size or zlib.crc32(block) != self.sums[layer]:
                    raise UserError(
                        f"{self.path}: damaged, layer {layer} of a response has another checksum; {self.remedy}"
                    )
                found[place] = np.frombuffer(block, kind).reshape(self.tokens, self.shape.chosen)
        return found


def index(path: Path) -> Path:
    """The JSON file of the routes in `path`."""
    return path.with_suffix(".json")


def has_routes(path: Path) -> bool:
    """Whether `path` was written to its end."""
    return path.exists() and index(path).exists()


@contextmanager
def write_routes(path: Path, of: Mapping[str, Any], write: bool) -> Iterator[Append]:
    """Yield a function that appends one update's routes; the file is whole or absent.

    `of` are JSON values that say what the routes belong to, read at the end of the block. `write` is true on one rank;
    on the others the function only goes through the layers. Memory holds one layer of one update.
    """
    if not write:
        yield _pass
        return
    for name in (path.name, index(path).name):
        remove_leftovers(path.parent, name)
    try:
        if index(path).exists():
            index(path).unlink()
            fsync(path.parent)
    except OSError as error:
        raise full_disk(error, path) or error from error
    parts: list[Part] = []
    shapes: set[Shape] = set()
    with durable_file(path) as file:

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
            parts.append(Part(start, int(ends[-1]), len(lengths), hashlib.sha256(table).hexdigest()))

        yield append
    (shape,) = shapes
    body = {"of": dict(of), **asdict(shape), "updates": [asdict(part) for part in parts]}
    write_sealed(index(path), "routes", body, format=FORMAT)


def _pass(lengths: Sequence[int], layers: Iterable[np.ndarray]) -> None:
    for _ in layers:  # the layers come from a collective
        pass


def read_routes(
    path: Path, of: Mapping[str, Any], update: int, lengths: Sequence[int], remedy: str
) -> list[StoredRoutes]:
    """The routes of the responses of an update, which have `lengths` tokens with routes; reads only their checksums.

    Raises UserError, ending with `remedy`, when a file is missing or damaged, or belongs to something else than `of`.
    """
    try:
        body = read_sealed(index(path), "routes", format=FORMAT)
        shape, part = Shape(body["layers"], body["chosen"], body["width"]), Part(**body["updates"][update])
    except (OSError, ValueError):
        raise UserError(f"{index(path)}: missing or damaged, so {path.name} cannot be read; {remedy}") from None
    if body["of"] != of or (part.tokens, part.responses) != (sum(lengths), len(lengths)):
        raise UserError(f"{path}: these are the routes of other responses or of another policy; {remedy}")
    stride = part.tokens * shape.token
    try:
        with path.open("rb", buffering=0) as file:
            table = os.pread(file.fileno(), 4 * shape.layers * len(lengths), part.start + shape.layers * stride)
    except OSError:
        raise UserError(f"{path}: missing, but {index(path).name} is there; {remedy}") from None
    if hashlib.sha256(table).hexdigest() != part.sums:
        raise UserError(f"{path}: damaged, the checksums of update {update} are not those that were written; {remedy}")
    sums = np.frombuffer(table, "<u4").reshape(shape.layers, -1)
    starts = part.start + shape.token * (np.cumsum(lengths) - lengths)
    return [
        StoredRoutes(path, shape, int(start), stride, tokens, sums[:, place], remedy)
        for place, (start, tokens) in enumerate(zip(starts, lengths, strict=True))
    ]


def routes_path(directory: Path, by: Replay) -> Path:
    """The file of a stage's routes."""
    return directory / NAMES[by]


def with_routes(samples: list[Sample], directory: Path, content: str, update: int, replay: Replay) -> list[Sample]:
    """The samples of an update of the stage of this `content`, with the routes that they replay, read when asked for.

    Without routes where nothing is replayed, and before the learner has recorded any. Raises UserError when their file
    is damaged, or the stage has none of the engine's.
    """
    if replay == "off" or (replay == "learner" and not has_routes(routes_path(directory, replay))):
        return samples
    lengths = [sample.tokens - 1 for sample in samples]
    routes = read_routes(routes_path(directory, replay), of_stage(content), update, lengths, REMEDIES[replay])
    return [replace(sample, routes=each) for sample, each in zip(samples, routes, strict=True)]
