"""Hugging Face checkpoint -> Megatron distributed checkpoint: `python -m checkpoints_convert.hf_to_megatron --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from checkpoints_convert.command import DTYPES, MEGABYTE, advance, fingerprint, open_partial, publish, run
from checkpoints_convert.distributed_checkpoint import (
    Item,
    PartWriter,
    from_journal,
    journal,
    write_metadata,
    write_part,
)
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.observe.progress import open_display
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.hf import carry_files, check_tokenizer
from mugrpo_megatron.weights.safetensors_dir import HFCheckpoint, open_checkpoint
from mugrpo_megatron.weights.table import DIMENSION, Entry, entries, merge, stored, whole_shape

PART_BYTES = 256 * 1024**2
LINEARS = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class Layout:
    """The learner's layout that the chunks are cut for; any other loads them as well, chunk by chunk."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1


def convert(hf: Path, out: Path, layout: Layout = Layout(), dtype: torch.dtype | None = None) -> None:
    """Write `out` from the checkpoint in `hf`, in its own types or cast to `dtype`; a stopped conversion is continued.

    Peak memory is the largest parameter and its copy. Raises UserError, with nothing written, for a checkpoint that is
    damaged or does not fit its config or tokenizer, a layout that does not divide the model, or a full disk.
    """
    architecture = read_architecture(hf)
    check_layout(architecture, layout)
    check_tokenizer(hf, architecture)
    checkpoint = open_checkpoint(hf, architecture)
    parts = list(divide(checkpoint, architecture, dtype))
    total = sum(size for part in parts for _, size in part)
    recipe = {"source": fingerprint(hf), "layout": layout.__dict__, "dtype": str(dtype)}
    directory = open_partial(out, recipe, total)
    items: list[Item] = []
    done = 0
    with open_display() as display, display.bar("Hugging Face -> Megatron", total // MEGABYTE, "MB") as bar:
        for number, part in enumerate(parts):
            record = directory / f"part-{number}.json"
            if record.is_file():
                items += from_journal(record.read_text(encoding="utf-8"))
                advance(bar, done := done + sum(size for _, size in part))
                continue
            with write_part(directory / f"__0_{number}.distcp") as writer:
                for entry, size in part:
                    write_entry(writer, checkpoint, entry, architecture, layout, dtype)
                    advance(bar, done := done + size)
            write_text(record, journal(writer.items))
            items += writer.items
    write_metadata(directory, items)
    carry_files(hf, directory, dtype or first_dtype(checkpoint))
    for number in range(len(parts)):
        (directory / f"part-{number}.json").unlink()
    publish(directory, out)


def write_entry(
    writer: PartWriter,
    checkpoint: HFCheckpoint,
    entry: Entry,
    architecture: Architecture,
    layout: Layout,
    dtype: torch.dtype | None,
) -> None:
    """One whole parameter, cut where the layout's tensor parallel ranks will read it."""
    place = stored(entry, architecture)
    whole = merge(entry, [checkpoint.read(name) for name in entry.hf], architecture)
    whole = whole.to(dtype or whole.dtype)
    shape = place.stack + tuple(whole.shape)
    dimension = DIMENSION.get(entry.row.split, 0)
    pieces = layout.tensor if entry.row.split != "none" else 1
    if entry.row.form == "gated" and pieces > 1:
        pieces *= 2  # a rank's gate and up are not contiguous
    start = 0
    for piece in whole.chunk(pieces, dim=dimension):
        inner = [0] * whole.dim()
        inner[dimension] = start
        chunk = piece.view((1,) * len(place.stack) + tuple(piece.shape)) if place.stack else piece
        writer.tensor(place.key, (*place.index, *inner), shape, chunk)
        start += piece.shape[dimension]
    if entry.row.megatron.endswith(LINEARS):
        # Megatron's layers expect an (empty) Transformer Engine state.
        index, stack = (".".join(map(str, numbers)) for numbers in (place.index, place.stack))
        writer.object(f"{place.key.removesuffix('weight')}_extra_state/shard_{index}_{stack}", [None])


def divide(
    checkpoint: HFCheckpoint, architecture: Architecture, dtype: torch.dtype | None
) -> Iterator[list[tuple[Entry, int]]]:
    """Parameters and their bytes, in data files of at most `PART_BYTES` (a larger parameter alone)."""
    part: list[tuple[Entry, int]] = []
    for entry in entries(architecture).values():
        item = (dtype or checkpoint.dtypes[entry.hf[0]]).itemsize
        values = torch.Size(whole_shape(entry, architecture)).numel()
        if part and sum(size for _, size in part) + values * item > PART_BYTES:
            yield part
            part = []
        part.append((entry, values * item))
    yield part


def check_layout(architecture: Architecture, layout: Layout) -> None:
    """Raises UserError when the layout cannot hold the model."""
    transformer = architecture.transformer
    stages = layout.pipeline * layout.virtual_pipeline
    wants = [
        ("--tp", layout.tensor, "attention heads", transformer["num_attention_heads"]),
        ("--tp", layout.tensor, "feed-forward width", transformer["ffn_hidden_size"]),
        ("--pp x --vpp", stages, "layers", architecture.layers),
    ]
    if architecture.experts or layout.expert > 1:
        wants.append(("--ep", layout.expert, "experts", architecture.experts))
    for option, size, what, extent in wants:
        if size < 1 or extent == 0 or extent % size:
            raise UserError(f"{option} {size} does not divide the model's {extent} {what}")
    groups = transformer["num_query_groups"]
    if groups % layout.tensor and layout.tensor % groups:
        raise UserError(f"--tp {layout.tensor} neither divides nor is a multiple of the {groups} key/value heads")
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        raise UserError(f"--vpp {layout.virtual_pipeline} needs --pp of at least 2")


def first_dtype(checkpoint: HFCheckpoint) -> torch.dtype:
    """The type of the checkpoint, which its config names."""
    return next(iter(checkpoint.dtypes.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hf_to_megatron", description=__doc__)
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint to read")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="distributed checkpoint to write")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size that the chunks are cut for")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size, checked against the layers")
    parser.add_argument("--vpp", type=int, default=1, help="virtual pipeline size, checked against the layers")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel size, checked against the experts")
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="keep the types or cast all weights")
    options = parser.parse_args(arguments)
    layout = Layout(options.tp, options.pp, options.vpp, options.ep)
    return run(parser.prog, partial(convert, options.hf, options.out, layout, DTYPES[options.dtype]))


if __name__ == "__main__":
    sys.exit(main())
