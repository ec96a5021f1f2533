"""Write Megatron's `torch_dist` checkpoint format one tensor at a time; `files.torch_dist` reads it.

The format is torch.distributed.checkpoint's (one pickled `.metadata`, data files with a `torch.save` for each chunk)
plus Megatron's `metadata.json` and `common.pt`. The libraries' writers need the whole state at once; here memory holds
at most one chunk, and a stopped conversion continues at the next file.
"""

from __future__ import annotations

import json
import pickle
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

from mugrpo_megatron.files.durable import durable_file
from mugrpo_megatron.files.torch_dist_index import INDEX

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
        info = _StorageInfo(item.file, item.start, item.length)
        if item.dtype == OBJECT:
            described[item.key] = BytesStorageMetadata()
            placed[MetadataIndex(item.key)] = info
            continue
        properties = TensorProperties(dtype=getattr(torch, item.dtype))
        tensor = described.setdefault(item.key, TensorStorageMetadata(properties, torch.Size(item.shape), []))
        assert isinstance(tensor, TensorStorageMetadata)
        placed[MetadataIndex(item.key, item.offsets, len(tensor.chunks))] = info
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
    metadata = Metadata(described, storage_data=placed, storage_meta=StorageMeta())
    (directory / INDEX).write_bytes(pickle.dumps(metadata))
    torch.save({}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def journal(items: Sequence[Item]) -> str:
    """The items of a finished part as JSON, for a later run that continues this one."""
    return json.dumps([asdict(item) for item in items])


def from_journal(text: str) -> list[Item]:
    """Inverse of `journal`."""
    return [_item(**row) for row in json.loads(text)]


def _item(offsets: list[int], sizes: list[int], shape: list[int], **fields: Any) -> Item:
    return Item(offsets=tuple(offsets), sizes=tuple(sizes), shape=tuple(shape), **fields)
