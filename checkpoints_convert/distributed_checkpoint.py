"""Write Megatron's `torch_dist` checkpoint format one tensor at a time; `files.torch_dist` reads it.

The format is torch.distributed.checkpoint's (one pickled `.metadata`, data files with a `torch.save` for each chunk)
plus Megatron's `metadata.json` and `common.pt`. The libraries' writers need the whole state at once; here memory holds
at most one chunk, and a stopped conversion continues at the next file.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mugrpo_megatron.files.durable import durable_file, write_json
from mugrpo_megatron.files.torch_dist import INDEX

CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
OBJECT = "object"


@dataclass(frozen=True)
class Item:
    """A chunk in a data file."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """`bfloat16`, ..., or `object` for a pickled object without offsets."""
    file: str
    start: int
    length: int


@contextmanager
def write_part(path: Path) -> Iterator[PartWriter]:
    """Write one data file, complete when the block ends; the writer's `items` then lists its chunks."""
    with durable_file(path) as stream:
        yield PartWriter(path.name, stream)


class PartWriter:
    """Appends chunks to a data file."""

    def __init__(self, file: str, stream: IO[bytes]) -> None:
        self._file, self._stream = file, stream
        self.items: list[Item] = []

    def tensor(self, key: str, offsets: Sequence[int], shape: Sequence[int], chunk: torch.Tensor) -> None:
        """Append a chunk of the tensor `key`, whose whole shape is `shape`."""
        if not chunk.is_contiguous() or chunk.untyped_storage().nbytes() != chunk.nbytes:
            chunk = chunk.clone(memory_format=torch.contiguous_format)  # torch.save writes the whole storage of a view
        start, length = self._save(chunk)
        dtype = str(chunk.dtype).removeprefix("torch.")
        self.items.append(Item(key, tuple(offsets), tuple(chunk.shape), tuple(shape), dtype, self._file, start, length))

    def object(self, key: str, value: Any) -> None:
        """Append a pickled object."""
        start, length = self._save(value)
        self.items.append(Item(key, (), (), (), OBJECT, self._file, start, length))

    def _save(self, value: Any) -> tuple[int, int]:
        start = self._stream.tell()
        torch.save(value, self._stream)
        return start, self._stream.tell() - start


def write_metadata(directory: Path, items: Sequence[Item]) -> None:
    """Write the files other than the data files; Megatron can then load the directory."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    placed: dict[MetadataIndex, _StorageInfo] = {}
    for item in items:
        # Interned, so that a continued conversion writes the same bytes: a pickle stores a string once for an object.
        key = sys.intern(item.key)
        info = _StorageInfo(sys.intern(item.file), item.start, item.length)
        if item.dtype == OBJECT:
            described[key] = BytesStorageMetadata()
            placed[MetadataIndex(key)] = info
            continue
        properties = TensorProperties(dtype=getattr(torch, item.dtype))
        tensor = described.setdefault(key, TensorStorageMetadata(properties, torch.Size(item.shape), []))
        assert isinstance(tensor, TensorStorageMetadata)
        placed[MetadataIndex(key, item.offsets, len(tensor.chunks))] = info
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
    metadata = Metadata(described, storage_data=placed, storage_meta=StorageMeta())
    with durable_file(directory / INDEX) as index:
        index.write(pickle.dumps(metadata))
    with durable_file(directory / "common.pt") as common:
        torch.save({}, common)
    write_json(directory / "metadata.json", CONFIG)


def described(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The items of a finished data file as JSON values, for a later run that continues this one."""
    return [asdict(item) for item in items]


def from_description(rows: list[dict[str, Any]]) -> list[Item]:
    """Inverse of `described`."""
    return [Item(**row | {name: tuple(row[name]) for name in ("offsets", "sizes", "shape")}) for row in rows]
