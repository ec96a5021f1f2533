"""Regions of the tensors of a distributed checkpoint: the one reader of its data files, for resuming and converting.

Only tensors are read, each by torch's `weights_only` unpickler; Megatron's other objects (`_extra_state`) never are:
Transformer Engine would run what they say.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.utils import _create_file_view

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import file_inside

INDEX = ".metadata"
SHOWN = 200
"""Characters of a reason; an index can hold any text, terminal escapes too."""
MOST_AXES = 64
"""torch's limit."""

DTYPES = frozenset(
    {
        "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bool",
        "uint8", "int8", "int16", "int32", "int64",
    }
)  # fmt: skip
"""Types of tensors in an index, as torch names them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and the bytes of a data file that hold it (written by torch.save)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint; its chunks are blocks of it, together as large as it is."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """Key -> tensor, of a distributed checkpoint; other objects in it are left out.

    Raises UserError when the index is absent, damaged, names a class that is not of the format, or describes data that
    its directory does not have.
    """
    path = directory / INDEX
    if not path.is_file():
        raise UserError(f"{directory} is not a Megatron distributed checkpoint: it has no {INDEX}")
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        tensors = dict(_tensors(metadata))
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error) or type(error).__name__)[:SHOWN].encode("unicode_escape").decode()
        raise UserError(f"{path} is damaged or not checkpoint metadata ({reason})") from None
    sizes: dict[str, int] = {}
    for chunk in (chunk for tensor in tensors.values() for chunk in tensor.chunks):
        if chunk.file not in sizes:
            sizes[chunk.file] = file_inside(path, chunk.file).stat().st_size
        if chunk.start + chunk.length > sizes[chunk.file]:
            raise UserError(
                f"{directory / chunk.file} is truncated: {INDEX} expects at least {chunk.start + chunk.length} bytes"
            )
    return tensors


class _Record:
    """Stands for an instance of a class of the format: the arguments that it was made with, and its state."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args = args
        return record

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Properties(_Record): ...


class _Block(_Record): ...


class _Place(_Record): ...


class _Stored(_Record): ...


class _Size(_Record): ...


class _Other(_Record):
    """Of the format, but nothing here needs it."""


_TORCH = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
CLASSES: Mapping[tuple[str, str], type[_Record]] = {
    (f"{_TORCH}.metadata", "Metadata"): _Metadata,
    (_MEGATRON, "MCoreMetadata"): _Metadata,
    (f"{_TORCH}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_TORCH}.metadata", "BytesStorageMetadata"): _Other,
    (f"{_TORCH}.metadata", "TensorProperties"): _Properties,
    (f"{_TORCH}.metadata", "ChunkStorageMetadata"): _Block,
    (f"{_TORCH}.metadata", "MetadataIndex"): _Place,
    (f"{_TORCH}.metadata", "StorageMeta"): _Other,
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"): _Other,
    (f"{_TORCH}.filesystem", "_StorageInfo"): _Stored,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Other,
    ("pathlib", "PosixPath"): _Other,
    ("pathlib._local", "PosixPath"): _Other,
}
"""What an index may name: module and name, both exactly."""


class _Unpickler(pickle._Unpickler):  # in Python: the one in C takes gigabytes for a memo index that a flipped bit made
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) in CLASSES:
            return CLASSES[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"it names extension {code}")


def _tensors(metadata: Any) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of an unpickled index; ValueError or any other exception when it is not one."""
    body = _state(metadata, _Metadata)
    places = {
        (_text(place["fqn"]), _numbers(place["offset"])): stored
        for place, stored in (
            (_state(index, _Place), _state(info, _Stored)) for index, info in body["storage_data"].items()
        )
        if place.get("offset") is not None
    }
    for key, value in body["state_dict_metadata"].items():
        if isinstance(value, _Tensor):
            yield _text(key), _tensor(key, value.state, places)


def _tensor(key: str, fields: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> StoredTensor:
    properties = fields["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"{key} has no known type")
    shape = _numbers(fields["size"])
    chunks = tuple(_chunk(key, shape, _state(block, _Block), places) for block in fields["chunks"])
    if len({chunk.offsets for chunk in chunks}) != len(chunks):
        raise ValueError(f"{key} has two chunks in one place")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {key} are not as large as it is")
    return StoredTensor(dtype, shape, chunks)


def _chunk(key: str, shape: tuple[int, ...], block: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> Chunk:
    offsets, sizes = _numbers(block["offsets"]), _numbers(block["sizes"])
    outside = any(start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True))
    stored = places.get((key, offsets))
    if outside or stored is None:
        raise ValueError(f"{key} has a chunk at {list(offsets)} that is {'outside of it' if outside else 'nowhere'}")
    if stored.get("transform_descriptors"):
        raise ValueError(f"{key} is stored with the transformation {stored['transform_descriptors']!r}")
    start, length = _numbers(_Size((stored["offset"], stored["length"])))
    return Chunk(offsets, sizes, stored["relative_path"], start, length)


def _state(value: Any, kind: type[_Record]) -> dict[str, Any]:
    if not isinstance(value, kind) or not isinstance(value.state, dict):
        raise ValueError(f"a {kind.__name__.strip('_').lower()} is missing")
    return value.state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a key is not text")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """The sizes of a torch.Size: whole numbers, none negative, each below 2^63."""
    numbers = tuple(value.args[0]) if isinstance(value, _Size) else ()
    if (
        not isinstance(value, _Size)
        or len(numbers) > MOST_AXES
        or any(type(one) is not int or not 0 <= one < 2**63 for one in numbers)
    ):
        raise ValueError("a size is not a list of numbers")
    return numbers


SEVERAL = -1
"""Stands for the row of chunks that have several."""


class Reader:
    """Reads regions of tensors from a checkpoint directory, whatever layout it was written in."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError when the directory is not a complete checkpoint or a data file is missing or too short."""
        self._directory = directory
        self._tensors = read_index(directory)
        self._rows: dict[str, dict[int, list[Chunk]]] = {}

    @property
    def files(self) -> set[str]:
        """Names of the files that hold the tensors and the index."""
        return {INDEX, *(chunk.file for stored in self._tensors.values() for chunk in stored.chunks)}

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Shape of a whole tensor, or None if the checkpoint does not have the key."""
        return self._tensors[key].shape if key in self._tensors else None

    def dtype(self, key: str) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self._stored(key).dtype))

    def read(self, key: str, index: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """The region of `shape` at the origin of the stack's slice `index`, in the stored type, on the CPU."""
        region = torch.empty((1,) * len(index) + shape, dtype=self.dtype(key))
        self.fill(region, key, index + (0,) * len(shape))
        return region.view(shape)

    @torch.no_grad()
    def fill(self, target: torch.Tensor, key: str, offsets: tuple[int, ...], padded: bool = False) -> None:
        """Copy the region at `offsets` into `target`, which has as many axes as the tensor; casts to its type.

        With `padded` the region may reach beyond the stored tensor, and is 0 there. Raises UserError when the
        checkpoint lacks the tensor or a part of the region, or when its data is damaged.
        """
        stored = self._stored(key)
        inside = [
            max(0, min(whole - start, size))
            for whole, start, size in zip(stored.shape, offsets, target.shape, strict=False)
        ]
        if len(stored.shape) != target.dim() or (inside != list(target.shape) and not padded):
            region = " x ".join(f"{start}:{start + size}" for start, size in zip(offsets, target.shape, strict=False))
            raise UserError(
                f"{self._directory}: {key} has shape {list(stored.shape)}, without the region {region} that this model "
                "needs; the checkpoint is of another model"
            )
        if padded:
            target.zero_()
        filled = 0
        rows = range(offsets[0], offsets[0] + target.shape[0]) if offsets else range(0)
        for chunk in self._near(key, stored, rows):
            overlap = list(_overlap(chunk, offsets, target.shape))
            if all(length > 0 for _, _, length in overlap):
                data, part = self._load(key, stored, chunk), target
                for axis, (source, start, length) in enumerate(overlap):
                    data, part = data.narrow(axis, source, length), part.narrow(axis, start, length)
                part.copy_(data)
                filled += part.numel()
        if filled != math.prod(inside):
            raise UserError(f"{self._directory}: {key} is incomplete: only {filled} of {math.prod(inside)} values")

    def _stored(self, key: str) -> StoredTensor:
        if key not in self._tensors:
            raise UserError(
                f"{self._directory} has no {key}, which this model needs; the checkpoint is of another model"
            )
        return self._tensors[key]

    def _near(self, key: str, stored: StoredTensor, rows: range) -> Iterator[Chunk]:
        """The chunks that can overlap these rows of the first axis: a stack of layers has thousands, one row each."""
        if key not in self._rows:
            of_row = self._rows[key] = {}
            for chunk in stored.chunks:
                of_row.setdefault(chunk.offsets[0] if chunk.sizes[:1] == (1,) else SEVERAL, []).append(chunk)
        for row in (SEVERAL, *rows):
            yield from self._rows[key].get(row, ())

    def _load(self, key: str, stored: StoredTensor, chunk: Chunk) -> torch.Tensor:
        path = self._directory / chunk.file
        try:
            with path.open("rb") as stream, warnings.catch_warnings(action="ignore"):  # torch's, about odd pickles
                view = _create_file_view(stream, chunk.start, chunk.length)
                data = torch.load(cast(IO[bytes], view), map_location="cpu", weights_only=True)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from None
        except Exception as error:  # a damaged archive can raise anything
            raise UserError(f"{path} is damaged: {key} cannot be read from it ({type(error).__name__})") from None
        plain = type(data) is torch.Tensor and data.layout == torch.strided and data.device.type == "cpu"
        if not plain or tuple(data.shape) != chunk.sizes or data.dtype != getattr(torch, stored.dtype):
            raise UserError(f"{path} is damaged: it does not hold the part of {key} that {INDEX} describes")
        return data


def _overlap(chunk: Chunk, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(start in the chunk, start in the region, length) for each axis; a length of 0 or less if they are disjoint."""
    for at, size, start, extent in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True):
        first = max(at, start)
        yield first - at, first - start, min(at + size, start + extent) - first
