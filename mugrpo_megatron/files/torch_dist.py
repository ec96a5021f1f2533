"""Reads regions of the tensors in a distributed checkpoint of Megatron, for resuming and converting.

The index is unpickled with an allow-list of torch's own classes, and every tensor with `weights_only`. Megatron's other
objects (`_extra_state`) are never unpickled, since Transformer Engine runs code that they contain.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import file_inside

INDEX = ".metadata"
REMEDY = "take another copy of the checkpoint, or an older one"
MAX_REASON_CHARS = 200
"""Most characters of a library's reason that an error quotes; an index can hold any text."""
MAX_AXES = 64
"""Most axes of a tensor in torch."""

DTYPES = frozenset(
    {
        "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bool",
        "uint8", "int8", "int16", "int32", "int64",
    }
)  # fmt: skip
"""Dtypes, as torch names them, that a tensor in an index may have."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and the range of bytes in a data file to which torch.save wrote the block."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint. Its chunks are disjoint blocks that cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """Returns key -> tensor for all tensors of a distributed checkpoint; its other objects are left out.

    Raises UserError when the index is absent or damaged, names a class that is not in `CLASSES`, or describes data that
    is missing from the directory.
    """
    path = directory / INDEX
    if not path.is_file():
        raise UserError(
            f"{directory} is not a Megatron distributed checkpoint: it has no {INDEX}; "
            "name the directory of such a checkpoint"
        )
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        tensors = dict(_tensors(metadata))
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error) or type(error).__name__)[:MAX_REASON_CHARS].encode("unicode_escape").decode()
        raise UserError(f"{path} is damaged or not checkpoint metadata ({reason}); {REMEDY}") from None
    sizes: dict[str, int] = {}
    for chunk in (chunk for tensor in tensors.values() for chunk in tensor.chunks):
        if chunk.file not in sizes:
            sizes[chunk.file] = file_inside(path, chunk.file).stat().st_size
        if chunk.start + chunk.length > sizes[chunk.file]:
            raise UserError(
                f"{directory / chunk.file} is truncated: {INDEX} expects at least {chunk.start + chunk.length} bytes; "
                f"{REMEDY}"
            )
    return tensors


class _Ignored:
    """Stands for a class of the index whose content is not needed; it accepts any arguments."""

    def __new__(cls, *arguments: Any) -> _Ignored:
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Properties(_Ignored):
    """Stands for torch's TensorProperties; only its dtype is read.

    Torch's own `__setstate__` needs an enum and a memory layout, which are not unpickled.
    """

    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_IGNORED = (
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_METADATA, "StorageMeta"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
)
CLASSES: Mapping[tuple[str, str], type] = {
    (_METADATA, "Metadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorStorageMetadata,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (_METADATA, "MetadataIndex"): MetadataIndex,
    (_FILESYSTEM, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    **dict.fromkeys(_IGNORED, _Ignored),
}
"""Classes that an index may name, by module and name."""


# The Unpickler that is written in Python: after a flipped bit, the one in C may allocate gigabytes for its memo.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) in CLASSES:
            return CLASSES[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"it names the pickle extension {code}, which no checkpoint needs")


_Blocks = Mapping[tuple[str, tuple[int, ...]], _StorageInfo]
"""(key of a tensor, offsets of a block in it) -> the file and the range of bytes that hold the block."""


def _tensors(metadata: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Yields (key, tensor) for the tensors in an unpickled index. Raises an exception of any type if `metadata` is not
    an index."""
    if not isinstance(metadata, Metadata):
        raise ValueError("the index does not hold a checkpoint's metadata")
    blocks = {
        (index.fqn, _numbers(index.offset)): info
        for index, info in metadata.storage_data.items()
        if index.offset is not None
    }
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            yield key, _tensor(key, tensor, blocks)


def _tensor(key: str, tensor: TensorStorageMetadata, blocks: _Blocks) -> StoredTensor:
    dtype: Any = tensor.properties.dtype
    if not isinstance(key, str) or dtype not in DTYPES:
        raise ValueError(f"{key!r} is not the name of a tensor, or its dtype is unknown")
    shape = _numbers(tensor.size)
    chunks = tuple(_chunk(key, shape, chunk, blocks) for chunk in tensor.chunks)
    if len({chunk.offsets for chunk in chunks}) != len(chunks):
        raise ValueError(f"{key} has two chunks that overlap")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {key} do not add up to its size")
    return StoredTensor(dtype, shape, chunks)


def _chunk(key: str, shape: tuple[int, ...], chunk: ChunkStorageMetadata, blocks: _Blocks) -> Chunk:
    offsets, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
    outside = any(start + size > extent for start, size, extent in zip(offsets, sizes, shape, strict=True))
    block = blocks.get((key, offsets))
    if outside or block is None:
        raise ValueError(
            f"{key} has a chunk at {list(offsets)} that is {'outside of the tensor' if outside else 'in no file'}"
        )
    if block.transform_descriptors:
        raise ValueError(f"{key} is stored with the transformation {block.transform_descriptors!r}, which is not read")
    start, length = _checked((block.offset, block.length))
    return Chunk(offsets, sizes, block.relative_path, start, length)


def _numbers(size: Any) -> tuple[int, ...]:
    return _checked(size if isinstance(size, torch.Size) and len(size) <= MAX_AXES else (None,))


def _checked(numbers: Sequence[Any]) -> tuple[int, ...]:
    """Returns the numbers as a tuple; ValueError unless all are integers from 0 to 2^63 - 1."""
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ValueError("a tensor's shape or its place in a file is not a list of whole numbers from 0 on")
    return tuple(numbers)


SEVERAL_ROWS = -1
"""Key in `Reader._rows` for the chunks that span several rows of the first axis."""


class Reader:
    """Reads regions of tensors from a checkpoint directory, whatever parallel layout the checkpoint was written in."""

    def __init__(self, directory: Path) -> None:
        """Read the index. Raises UserError when the directory is no complete checkpoint, or a data file is missing or
        too short."""
        self._directory = directory
        self._tensors = read_index(directory)
        self._rows: dict[str, dict[int, list[Chunk]]] = {}

    @property
    def files(self) -> set[str]:
        """Names of the index and of the files that hold the tensors."""
        return {INDEX, *(chunk.file for stored in self._tensors.values() for chunk in stored.chunks)}

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None if the checkpoint lacks the key."""
        return self._tensors[key].shape if key in self._tensors else None

    def dtype(self, key: str) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self._stored(key).dtype))

    def read(self, key: str, index: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Returns, on the CPU and in the stored dtype, a region of a tensor whose first axes stack smaller tensors.

        `index` is the position on these first axes. On the others the region begins at 0 and has the sizes `shape`.
        """
        region = torch.empty((1,) * len(index) + shape, dtype=self.dtype(key))
        self.fill(region, key, index + (0,) * len(shape))
        return region.view(shape)

    @torch.no_grad()
    def fill(self, target: torch.Tensor, key: str, offsets: tuple[int, ...], padded: bool = False) -> None:
        """Copy a region of a stored tensor into `target`, cast to its dtype. `target` has as many axes as the tensor.

        The region begins at `offsets` and has the target's shape. With `padded` it may reach beyond the stored tensor,
        and is 0 there. Raises UserError when the checkpoint lacks the tensor or a part of the region, or when its data
        is damaged.
        """
        stored = self._stored(key)
        inside = [
            max(0, min(extent - start, size))
            for extent, start, size in zip(stored.shape, offsets, target.shape, strict=False)
        ]
        if len(stored.shape) != target.dim() or (inside != list(target.shape) and not padded):
            bounds = " x ".join(f"{start}:{start + size}" for start, size in zip(offsets, target.shape, strict=False))
            raise UserError(
                f"{self._directory}: {key} has shape {list(stored.shape)}, without the region {bounds} that this model "
                "needs; the checkpoint is of another model: choose one of this model"
            )
        if padded:
            target.zero_()
        filled = 0
        rows = range(offsets[0], offsets[0] + target.shape[0]) if offsets else range(0)
        for chunk in self._chunks_near(key, stored, rows):
            overlap = list(_overlap(chunk, offsets, target.shape))
            if all(length > 0 for _, _, length in overlap):
                data, region = self._load(key, stored, chunk), target
                for axis, (source, start, length) in enumerate(overlap):
                    data, region = data.narrow(axis, source, length), region.narrow(axis, start, length)
                region.copy_(data)
                filled += region.numel()
        if filled != math.prod(inside):
            raise UserError(
                f"{self._directory}: {key} is incomplete: only {filled} of {math.prod(inside)} values are there; "
                f"{REMEDY}"
            )

    def _stored(self, key: str) -> StoredTensor:
        if key not in self._tensors:
            raise UserError(
                f"{self._directory} has no {key}, which this model needs; the checkpoint is of another model: "
                "choose one of this model"
            )
        return self._tensors[key]

    def _chunks_near(self, key: str, stored: StoredTensor, rows: range) -> Iterator[Chunk]:
        """Yields the chunks that can overlap these rows of the first axis: those that lie in one of the rows, and all
        chunks that span several rows."""
        if key not in self._rows:
            # A stack of layers has thousands of chunks of one row each: without this table every read would search all.
            chunks = self._rows[key] = {}
            for chunk in stored.chunks:
                chunks.setdefault(chunk.offsets[0] if chunk.sizes[:1] == (1,) else SEVERAL_ROWS, []).append(chunk)
        for row in (SEVERAL_ROWS, *rows):
            yield from self._rows[key].get(row, ())

    def _load(self, key: str, stored: StoredTensor, chunk: Chunk) -> torch.Tensor:
        path = self._directory / chunk.file
        try:
            # Torch may warn about an unusual pickle; what the file has to hold is checked below.
            with path.open("rb") as stream, warnings.catch_warnings(action="ignore"):
                view = _create_file_view(stream, chunk.start, chunk.length)
                data = torch.load(cast(IO[bytes], view), map_location="cpu", weights_only=True)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); {REMEDY}") from None
        except Exception as error:  # a damaged archive can raise anything
            raise UserError(
                f"{path} is damaged: {key} cannot be read from it ({type(error).__name__}); {REMEDY}"
            ) from None
        plain = type(data) is torch.Tensor and data.layout == torch.strided and data.device.type == "cpu"
        if not plain or tuple(data.shape) != chunk.sizes or data.dtype != getattr(torch, stored.dtype):
            raise UserError(f"{path} is damaged: it does not hold the part of {key} that {INDEX} describes; {REMEDY}")
        return data


def _overlap(chunk: Chunk, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yields, for each axis, where the overlap starts in the chunk and in the region, and its length.

    A length of 0 or less means that chunk and region are disjoint.
    """
    for chunk_start, chunk_size, start, size in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True):
        first = max(chunk_start, start)
        yield first - chunk_start, first - start, min(chunk_start + chunk_size, start + size) - first
