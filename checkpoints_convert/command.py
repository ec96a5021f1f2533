"""Code that the conversions share: exit codes, progress, and checks that a source is unchanged, intact and the right
model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

from checkpoints_convert.output import RECORD, Output, converted_files
from mugrpo_megatron.errors import UserError, refused_by_system
from mugrpo_megatron.files.checkpoint_state import STATE, read_state
from mugrpo_megatron.files.durable import digest
from mugrpo_megatron.files.hf_config import CONFIG, read_config
from mugrpo_megatron.files.torch_dist import Reader
from mugrpo_megatron.observe.progress import Bar, open_display
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.config import WITHOUT_EFFECT
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.safetensors_dir import WeightFile, write_index, write_shard
from mugrpo_megatron.weights.table import Entry, entries, stored

DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEGABYTE = 10**6
ABOUT_THE_FILE = {"dtype", "torch_dtype", "transformers_version", "num_nextn_predict_layers"}
"""Config fields about how a checkpoint was written, or about what is stored besides the model; they may differ."""


def run(name: str, command: Callable[[], None]) -> int:
    """Run a command and return its exit code: 0 for done, 2 for a mistake in the input, with one sentence on stderr."""
    torch.set_num_threads(1)  # the work is copies and checksums, for which more threads only cost memory
    try:
        command()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a directory that cannot be read or written, a disk that fails
        sentence = refused_by_system(error) or f"{error.filename or 'a file'}: {error.strerror or error}"
        print(f"{name}: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


def noted_architecture(directory: Path) -> Architecture:
    """Read a checkpoint's architecture; prints the line about config fields without effect, as training does."""
    architecture = read_architecture(directory)
    if architecture.note:
        print(architecture.note)
    return architecture


def advance(bar: Bar, done: int) -> None:
    """Set a bar that counts megabytes to `done`, a number of bytes."""
    bar.advance(done // MEGABYTE - bar.done)


def fill_hf(
    output: Output, source: str, shards: Sequence[WeightFile], tensors: Callable[[WeightFile], Iterator[torch.Tensor]]
) -> None:
    """Write the shards of a Hugging Face checkpoint that `output` lacks, and their index; shows a bar."""
    done = 0
    total = sum(shard.bytes for shard in shards)
    with open_display() as display, display.bar(f"{source} -> Hugging Face", total // MEGABYTE, "MB") as bar:
        for shard in shards:
            if not output.finished(shard.file):
                write_shard(output.directory, shard, tensors(shard))
                output.finish(shard.file)
            advance(bar, done := done + shard.bytes)
        write_index(output.directory, shards)


def fingerprint(directory: Path) -> dict[str, list[int]]:
    """File name -> size and modification time, by which a continued conversion knows that its source is unchanged."""
    files = sorted(path for path in directory.glob("*") if path.is_file())
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def check_sums(directory: Path, files: Collection[str]) -> None:
    """Check the `files` that are read against the checksums of a training checkpoint or of a conversion's output.

    Raises UserError if one differs or has no checksum. A checkpoint of other Megatron code has no checksums and passes.
    """
    where, known = _checksums(directory)
    if known is None:
        return
    paths = {name: directory / name for name in sorted(files)}
    total = sum(path.stat().st_size for path in paths.values())
    done = 0
    with open_display() as display, display.bar("checksums", total // MEGABYTE, "MB") as bar:
        for name, path in paths.items():
            if name not in known:
                raise UserError(
                    f"{where} has no checksum of {name}, so {directory} is damaged; take another copy of it"
                )
            if digest(path).sha256 != known[name]:
                raise UserError(
                    f"{path} is damaged: its checksum is not the one in {where.name}; take another copy of it"
                )
            advance(bar, done := done + path.stat().st_size)


def _checksums(directory: Path) -> tuple[Path, dict[str, str] | None]:
    """The path of the file with the checksums, and name -> checksum; None if the directory has no such file."""
    if (directory / STATE).exists():
        return directory / STATE, read_state(directory)["files"]
    record = directory / RECORD
    known = converted_files(directory)
    if known is None and record.exists():
        raise UserError(f"{record} is damaged, so the other files of {directory} cannot be checked; convert it again")
    return record, known


def compare_configs(megatron: Path, like: Path) -> int:
    """Compare the config fields that have an effect and return their number; 0 for a training checkpoint, which has
    none.

    Raises UserError if one differs.
    """
    if not (megatron / CONFIG).is_file():
        return 0
    ours, theirs = (dict(read_config(side)) for side in (megatron, like))
    unread = {name for side in (megatron, like) for name in read_architecture(side).unread}
    names = (ours.keys() | theirs.keys()) - ABOUT_THE_FILE - (WITHOUT_EFFECT - {"model_type"}) - unread
    for name in sorted(names, key=lambda name: (name != "model_type", name)):
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"config field {name} is {ours.get(name)!r} in {megatron} and {theirs.get(name)!r} in {like}; "
                f"they are not the same model"
            )
    return len(names)


def check_model(reader: Reader, megatron: Path, architecture: Architecture, like: Path) -> None:
    """Raise UserError when a parameter of the model that `like` describes is missing, or has another shape."""
    for entry in entries(architecture).values():
        for place in stored(entry, architecture):
            shape, expected = reader.shape(place.key), place.stacked_shape
            if shape is None:
                raise UserError(
                    f"{megatron} has no {place.key}, which the {architecture.family} model in {like} needs; "
                    f"the checkpoint is of another model: choose the checkpoint of {like}"
                )
            if entry.row.form == "vocab" and shape[0] >= expected[0]:  # padded for tensor parallelism
                shape = (expected[0], *shape[1:])
            if shape != expected:
                raise UserError(
                    f"{megatron}: {place.key} has shape {list(shape)}, the config in {like} says {list(expected)}; "
                    f"the checkpoint is of another model: choose the checkpoint of {like}"
                )


def read_parameter(reader: Reader, entry: Entry, architecture: Architecture) -> torch.Tensor:
    """Read a whole parameter of a distributed checkpoint, in its stored dtype."""
    sections = [reader.read(place.key, place.index, place.shape) for place in stored(entry, architecture)]
    return torch.cat(sections) if len(sections) > 1 else sections[0]
