"""Convert a Hugging Face checkpoint into a Megatron distributed checkpoint: `mugrpo convert hf_to_megatron --help`.

Megatron's format `torch_dist` is the one of torch.distributed.checkpoint (a pickled `.metadata`, and data files with a
`torch.save` for each chunk) with Megatron's `metadata.json` and `common.pt`; `files.torch_dist` reads it. The writers
of both libraries need the whole state in memory. This one holds at most one chunk, and continues a stopped conversion
at the next file.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
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

from checkpoints_convert.command import DTYPES, MEGABYTE, advance, fingerprint, noted_architecture, run
from checkpoints_convert.output import checked_output, open_output
from mugrpo_megatron.checks.layouts import split_problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import durable_file, write_json
from mugrpo_megatron.files.hf_config import read_config
from mugrpo_megatron.files.torch_dist import INDEX
from mugrpo_megatron.observe.progress import open_display
from mugrpo_megatron.recipe.systems import ParallelSection
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.hf import carry_files, check_tokenizer
from mugrpo_megatron.weights.safetensors_dir import HFCheckpoint, open_checkpoint
from mugrpo_megatron.weights.table import DIMENSION, Entry, entries, merge_from_hf, stored, whole_shape

PART_BYTES = 256 * 1024**2
CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
OBJECT = "object"
WHOLE = ParallelSection()
OPTIONS = {"tensor": "--tp", "pipeline": "--pp", "virtual_pipeline": "--vpp", "expert": "--ep"}
LINEARS = (
    *(f"linear_{name}.weight" for name in ("qkv", "q_proj", "q_up_proj", "kv_up_proj", "proj", "fc1", "fc2")),
    *(f"self_attention.{name}_proj.weight" for name in ("in", "out")),
)


def convert(
    hf: Path,
    out: Path,
    parallel: ParallelSection = WHOLE,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Convert the checkpoint in `hf` to `out`, in its own dtypes or cast to `dtype`; a stopped conversion is continued.

    The chunks are cut for the layout `parallel`; other layouts can load them too, chunk by chunk. Peak memory is the
    largest parameter and a copy of it. Raises UserError, with nothing written, for a checkpoint that is damaged or does
    not match its config or tokenizer, a layout that does not divide the model, or a full disk. It also raises UserError
    for an `out` that must not be replaced: an input, or anything else that exists, unless a conversion wrote it and
    `overwrite` is true.
    """
    out = checked_output(out, {"--hf": hf}, overwrite)
    architecture = noted_architecture(hf)
    if problems := list(split_problems(parallel, read_config(hf), OPTIONS)):
        raise UserError("; ".join(problems))
    check_tokenizer(hf, architecture)
    checkpoint = open_checkpoint(hf, architecture)
    parts = list(divide(checkpoint, architecture, dtype))
    total = sum(size for part in parts for _, size in part)
    recipe = {"source": fingerprint(hf), "layout": parallel.model_dump(), "dtype": str(dtype)}
    items: list[ChunkRecord] = []
    done = 0
    with (
        open_output(out, recipe, total, overwrite) as output,
        open_display() as display,
        display.bar("Hugging Face -> Megatron", total // MEGABYTE, "MB") as bar,
    ):
        for number, part in enumerate(parts):
            file = f"__0_{number}.distcp"
            if note := output.finished(file):
                items += records_from_json(note["body"])
                advance(bar, done := done + sum(size for _, size in part))
                continue
            with write_part(output.directory / file) as writer:
                for entry, size in part:
                    write_entry(writer, checkpoint, entry, architecture, parallel.tensor, dtype)
                    advance(bar, done := done + size)
            output.finish(file, records_as_json(writer.items))
            items += writer.items
        write_metadata(output.directory, items)
        carry_files(hf, output.directory, dtype or next(iter(checkpoint.dtypes.values())))


def write_entry(
    writer: PartWriter,
    checkpoint: HFCheckpoint,
    entry: Entry,
    architecture: Architecture,
    tensor_parallel: int,
    dtype: torch.dtype | None,
) -> None:
    """Write a whole parameter, cut into the chunks that tensor parallel ranks read."""
    parameter = merge_from_hf(entry, [checkpoint.read(name) for name in entry.hf], architecture)
    target = torch.float32 if entry.row.frozen else dtype or parameter.dtype
    parameter = cast_checked(parameter, target, " or ".join(entry.hf))
    dimension = DIMENSION.get(entry.row.split, 0)
    pieces = tensor_parallel if entry.row.split != "none" else 1
    if entry.row.form == "gated" and pieces > 1:
        pieces *= 2  # a rank's parts of gate and up are not next to each other
    places = stored(entry, architecture)
    for place, section in zip(places, parameter.split([place.shape[0] for place in places]), strict=True):
        start = 0
        for piece in section.chunk(pieces, dim=dimension):
            inner = [0] * parameter.dim()
            inner[dimension] = start
            chunk = piece.view((1,) * len(place.stack) + tuple(piece.shape)) if place.stack else piece
            writer.tensor(place.key, (*place.index, *inner), place.stacked_shape, chunk)
            start += piece.shape[dimension]
    if entry.row.megatron.endswith(LINEARS):
        # Megatron's layers expect a state of Transformer Engine, which is empty here.
        index, stack = (".".join(map(str, numbers)) for numbers in (places[0].index or (0,), places[0].stack or (1,)))
        writer.object(f"{places[0].key.partition('weight')[0]}_extra_state/shard_{index}_{stack}", [None])


def cast_checked(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast the tensor to `dtype`. Raises UserError for NaN, infinities, and values that overflow (in float16 above
    65,504)."""
    if tensor.dtype.itemsize > 1 and not torch.isfinite(tensor).all():
        raise UserError(
            f"{name}: a value is not a number (NaN) or infinite, so the checkpoint is damaged; take another copy of it"
        )
    narrow = tensor.to(dtype)
    if dtype != tensor.dtype and torch.isinf(narrow).any():
        raise UserError(f"{name}: a value is too large for {str(dtype).removeprefix('torch.')}; take bfloat16")
    return narrow


def divide(
    checkpoint: HFCheckpoint, architecture: Architecture, dtype: torch.dtype | None
) -> Iterator[list[tuple[Entry, int]]]:
    """Divide the parameters among data files of at most `PART_BYTES`; yields (parameter, bytes) of each file.

    A larger parameter has a file of its own.
    """
    part: list[tuple[Entry, int]] = []
    for entry in entries(architecture).values():
        item = (dtype or checkpoint.dtypes[entry.hf[0]]).itemsize
        values = torch.Size(whole_shape(entry, architecture)).numel()
        if part and sum(size for _, size in part) + values * item > PART_BYTES:
            yield part
            part = []
        part.append((entry, values * item))
    yield part


# ------------------------------------------------------------ the format


@dataclass(frozen=True)
class ChunkRecord:
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """`bfloat16`, ...; `object` for a pickled object, which has no offsets."""
    file: str
    start: int
    length: int


@contextmanager
def write_part(path: Path) -> Iterator[PartWriter]:
    """Yield the writer of one data file, which is complete when the block ends; `items` of the writer lists its
    chunks."""
    with durable_file(path) as stream:
        yield PartWriter(path.name, stream)


class PartWriter:
    def __init__(self, file: str, stream: IO[bytes]) -> None:
        self._file, self._stream = file, stream
        self.items: list[ChunkRecord] = []

    def tensor(self, key: str, offsets: Sequence[int], shape: Sequence[int], chunk: torch.Tensor) -> None:
        """Append a chunk of the tensor `key`; `shape` is the shape of the whole tensor."""
        if not chunk.is_contiguous() or chunk.untyped_storage().nbytes() != chunk.nbytes:
            chunk = chunk.clone(memory_format=torch.contiguous_format)  # torch.save writes the whole storage of a view
        start, length = self._save(chunk)
        dtype = str(chunk.dtype).removeprefix("torch.")
        self.items.append(
            ChunkRecord(key, tuple(offsets), tuple(chunk.shape), tuple(shape), dtype, self._file, start, length)
        )

    def object(self, key: str, value: Any) -> None:
        start, length = self._save(value)
        self.items.append(ChunkRecord(key, (), (), (), OBJECT, self._file, start, length))

    def _save(self, value: Any) -> tuple[int, int]:
        start = self._stream.tell()
        torch.save(value, self._stream)
        return start, self._stream.tell() - start


def write_metadata(directory: Path, items: Sequence[ChunkRecord]) -> None:
    """Write the files besides the data files, so that Megatron can load the directory."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    placed: dict[MetadataIndex, _StorageInfo] = {}
    for item in items:
        # Strings are interned, so that a continued conversion writes the same bytes: a pickle refers back to a string
        # only if it is the same object.
        key = sys.intern(item.key)
        info = _StorageInfo(sys.intern(item.file), item.start, item.length)
        if item.dtype == OBJECT:
            tensors[key] = BytesStorageMetadata()
            placed[MetadataIndex(key)] = info
            continue
        properties = TensorProperties(dtype=getattr(torch, item.dtype))
        tensor = tensors.setdefault(key, TensorStorageMetadata(properties, torch.Size(item.shape), []))
        assert isinstance(tensor, TensorStorageMetadata)
        placed[MetadataIndex(key, item.offsets, len(tensor.chunks))] = info
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
    metadata = Metadata(tensors, storage_data=placed, storage_meta=StorageMeta())
    with durable_file(directory / INDEX) as index:
        index.write(pickle.dumps(metadata))
    with durable_file(directory / "common.pt") as common:
        torch.save({}, common)
    write_json(directory / "metadata.json", CONFIG)


def records_as_json(items: Sequence[ChunkRecord]) -> list[dict[str, Any]]:
    """The records of a finished data file as JSON values, for a later run that continues the conversion."""
    return [asdict(item) for item in items]


def records_from_json(rows: list[dict[str, Any]]) -> list[ChunkRecord]:
    """The records that `records_as_json` turned into JSON values."""
    return [ChunkRecord(**row | {name: tuple(row[name]) for name in ("offsets", "sizes", "shape")}) for row in rows]


# ------------------------------------------------------------ the command


def positive(text: str) -> int:
    """Parse a number of at least 1 for argparse, which reports the ValueError of a wrong one."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mugrpo convert hf_to_megatron", description=__doc__.partition(":")[0])
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint to read")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="distributed checkpoint to write")
    parser.add_argument("--tp", type=positive, default=1, help="tensor parallel size that the chunks are cut for")
    parser.add_argument("--pp", type=positive, default=1, help="pipeline parallel size, checked against the layers")
    parser.add_argument("--vpp", type=positive, default=1, help="virtual pipeline size, checked against the layers")
    parser.add_argument("--ep", type=positive, default=1, help="expert parallel size, checked against the experts")
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="keep the types or cast all weights")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if a conversion wrote it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser()
    options = parser.parse_args(arguments)
    parallel = ParallelSection(tensor=options.tp, pipeline=options.pp, virtual_pipeline=options.vpp, expert=options.ep)
    settings = options.hf, options.out, parallel, DTYPES[options.dtype], options.overwrite
    return run(parser.prog, partial(convert, *settings))


if __name__ == "__main__":
    sys.exit(main())
