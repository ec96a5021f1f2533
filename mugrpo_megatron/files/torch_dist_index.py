"""The index of a distributed checkpoint, read as data.

`.metadata` is a pickle of torch.distributed.checkpoint's `Metadata`. A pickle can name any function and call it, so
this reader calls none: for the classes of the format, listed here by exact module and name, it makes records of its
own, and what it returns are plain names and numbers, checked. Nothing else in this project reads `.metadata`.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.inside import file_inside

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
