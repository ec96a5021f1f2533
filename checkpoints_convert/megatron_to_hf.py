"""Convert a Megatron distributed checkpoint into a Hugging Face checkpoint: `mugrpo convert megatron_to_hf --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from checkpoints_convert.command import (
    DTYPES,
    check_model,
    check_sums,
    compare_configs,
    fill_hf,
    fingerprint,
    noted_architecture,
    read_parameter,
    run,
)
from checkpoints_convert.output import checked_output, open_output
from mugrpo_megatron.files.torch_dist import Reader
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.hf import SHARD_BYTES, carry_files, check_tokenizer
from mugrpo_megatron.weights.safetensors_dir import TensorSpec, WeightFile, divide
from mugrpo_megatron.weights.table import Entry, entries, split_to_hf, stored


def convert(
    megatron: Path,
    out: Path,
    like: Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Convert the weights in `megatron` to `out`, with the config and tokenizer of `like`; continues a stopped
    conversion.

    `megatron` is the output of a conversion or a training checkpoint, in any layout. Peak memory is the largest
    parameter and one chunk of it. Raises UserError, with nothing written, when a directory is damaged, when the
    checkpoint is not of the model that `like` describes, or when the disk is full. It also raises UserError for an
    `out` that must not be replaced: an input, or anything else that exists, unless a conversion wrote it and
    `overwrite` is true.
    """
    out = checked_output(out, {"--megatron": megatron, "--like": like}, overwrite)
    architecture = noted_architecture(like)
    check_tokenizer(like, architecture)
    reader = Reader(megatron)
    compare_configs(megatron, like)
    check_model(reader, megatron, architecture, like)
    check_sums(megatron, reader.files)
    owners = {name: entry for entry in entries(architecture).values() for name in entry.hf}
    specs = [spec for entry in entries(architecture).values() for spec in specs_of(reader, entry, architecture, dtype)]
    shards = divide(specs, shard_bytes)
    recipe = {
        "source": fingerprint(megatron),
        "like": fingerprint(like),
        "dtype": str(dtype),
        "shards": [shard.file for shard in shards],
    }
    with open_output(out, recipe, sum(shard.bytes for shard in shards), overwrite) as output:
        fill_hf(output, "Megatron", shards, lambda shard: tensors_of(reader, shard, owners, architecture))
        carry_files(like, output.directory, specs[0].dtype)


def specs_of(
    reader: Reader, entry: Entry, architecture: Architecture, dtype: torch.dtype | None
) -> Iterator[TensorSpec]:
    """Yield the Hugging Face tensors that a parameter becomes, in the stored dtype or cast to `dtype`."""
    target = torch.float32 if entry.row.frozen else dtype or reader.dtype(stored(entry, architecture)[0].key)
    for name, shape in zip(entry.hf, entry.hf_shapes(architecture), strict=True):
        yield TensorSpec(name, shape, target)


def tensors_of(
    reader: Reader, shard: WeightFile, owners: dict[str, Entry], architecture: Architecture
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a shard in its order; a parameter that becomes several tensors in a row is read once."""
    current: Entry | None = None
    parts: dict[str, torch.Tensor] = {}
    for spec in shard.specs:
        if owners[spec.name] is not current:
            current = owners[spec.name]
            parts = {}  # frees the last parameter before the next is read
            parts = read_entry(reader, current, architecture)
        yield parts[spec.name].reshape(spec.shape)


def read_entry(reader: Reader, entry: Entry, architecture: Architecture) -> dict[str, torch.Tensor]:
    """Hugging Face name -> tensor, for those that a stored parameter holds. Their shapes may still be Megatron's."""
    parameter = read_parameter(reader, entry, architecture)
    return dict(zip(entry.hf, split_to_hf(entry, parameter, architecture), strict=True))


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mugrpo convert megatron_to_hf", description=__doc__.partition(":")[0])
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="distributed checkpoint to read")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="Hugging Face directory to write")
    parser.add_argument(
        "--like",
        type=Path,
        required=True,
        metavar="HF_DIR",
        help="Hugging Face checkpoint whose config and tokenizer are used",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="keep the types or cast all weights")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if a conversion wrote it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser()
    options = parser.parse_args(arguments)
    command = partial(convert, dtype=DTYPES[options.dtype], overwrite=options.overwrite)
    return run(parser.prog, partial(command, options.megatron, options.out, options.like))


if __name__ == "__main__":
    sys.exit(main())
