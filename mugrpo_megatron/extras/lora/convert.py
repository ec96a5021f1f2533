"""Merge an adapter into its model, or extract one from a training checkpoint: `... convert --help`.

python -m mugrpo_megatron.extras.lora.convert merge --hf DIR --adapter DIR --out DIR
python -m mugrpo_megatron.extras.lora.convert extract --megatron DIR --hf DIR --out DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from checkpoints_convert.command import fill_hf, fingerprint, run
from checkpoints_convert.output import checked_output, open_output
from checkpoints_convert.source import check_sums
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.lora.low_rank import merge as merged
from mugrpo_megatron.extras.lora.peft_files import adapter_files, check_base, read_adapter
from mugrpo_megatron.extras.lora.targets import Leaf, adapted_leaves, is_linear, kind, leaves_of
from mugrpo_megatron.files.durable import write_content
from mugrpo_megatron.files.hf_config import read_state
from mugrpo_megatron.files.torch_dist import Reader
from mugrpo_megatron.weights import families
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.hf import SHARD_BYTES, carry_files, check_tokenizer
from mugrpo_megatron.weights.safetensors_dir import (
    HFCheckpoint,
    Shard,
    TensorSpec,
    divide,
    open_checkpoint,
)
from mugrpo_megatron.weights.table import ADAPTER, entries


def merge(hf: Path, adapter: Path, out: Path, overwrite: bool = False) -> None:
    """Write `out`: the checkpoint in `hf` with W + alpha / r B A, in float32 before the cast, tensor by tensor.

    Raises UserError, with nothing written, for an adapter that does not fit or was trained on other weights.
    """
    out = checked_output(out, {"--hf": hf, "--adapter": adapter}, overwrite)
    architecture = read_architecture(hf)
    check_tokenizer(hf, architecture)
    checkpoint = open_checkpoint(hf, architecture)
    found = read_adapter(adapter, architecture, "--adapter")
    check_base(found, hf, "--adapter")
    factors, scale = found.read(), found.alpha / found.rank
    leaves = {f"{leaf.name}.weight": leaf for leaf in adapted_leaves(architecture, found.kinds)}
    specs = [
        TensorSpec(name, shape, checkpoint.dtypes[name])
        for entry in entries(architecture).values()
        for name, shape in zip(entry.hf, entry.hf_shapes(architecture), strict=True)
    ]
    shards = divide(specs, SHARD_BYTES)
    recipe = {"source": fingerprint(hf), "adapter": fingerprint(adapter), "shards": [shard.file for shard in shards]}
    with open_output(out, recipe, sum(shard.bytes for shard in shards), overwrite) as output:
        fill_hf(output, "adapter", shards, lambda shard: _merged(checkpoint, shard, leaves, factors, scale))
        carry_files(hf, output.directory, specs[0].dtype)


def _merged(
    checkpoint: HFCheckpoint,
    shard: Shard,
    leaves: Mapping[str, Leaf],
    factors: Mapping[str, torch.Tensor],
    scale: float,
) -> Iterator[torch.Tensor]:
    for spec in shard.specs:
        weight, leaf = checkpoint.read(spec.name), leaves.get(spec.name)
        if leaf:
            a, b = (factors[name].to(weight.dtype) for name in (leaf.a, leaf.b))  # as the learner has them
            weight = merged(weight, a, b, scale).to(weight.dtype)
        yield weight


def extract(megatron: Path, hf: Path, out: Path, overwrite: bool = False) -> None:
    """Write `out`: the adapter of a run's checkpoint in PEFT's format; `hf` is the model that the run began with.

    Raises UserError, with nothing written, for a checkpoint without adapters, of another model, or damaged.
    """
    out = checked_output(out, {"--megatron": megatron, "--hf": hf}, overwrite)
    architecture, model = read_architecture(hf), read_state(megatron)["model"]
    if "lora_rank" not in model:
        raise UserError(f"{megatron} has no adapters: all weights are in it; use checkpoints_convert.megatron_to_hf")
    if model["base"] != families.fingerprint(hf):
        raise UserError(
            f"{megatron} has adapters of other weights than {hf} holds; name the model that its run began with"
        )
    reader = Reader(megatron)
    check_sums(megatron, reader.files)
    rank, alpha, kinds = int(model["lora_rank"]), float(model["lora_alpha"]), str(model["lora_targets"]).split()
    tensors = {}
    for row in filter(is_linear, architecture.table):
        above, _, own = row.megatron.removesuffix(".weight").replace("{layer}.", "").rpartition(".")
        for layer in range(architecture.layers):
            for leaf in leaves_of(row, layer, architecture):
                name = kind(leaf.name)
                for factor, (peft, shape) in zip("ab", leaf.shapes(rank).items(), strict=True):
                    if name in kinds:
                        tensors[peft] = reader.read(f"{above}.{ADAPTER}{own}.{factor}.{name}", (layer,), shape)
    files = adapter_files(tensors, rank, alpha, kinds, hf, str(model["base"]))
    recipe = {"source": fingerprint(megatron), "like": fingerprint(hf)}
    with open_output(out, recipe, sum(one.nbytes for one in tensors.values()), overwrite) as output:
        for name, content in files.items():
            write_content(output.directory / name, content)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="convert", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name, option, text in (
        ("merge", "--adapter", "adapter in PEFT's format"),
        ("extract", "--megatron", "checkpoint of a run with [lora]"),
    ):
        one = commands.add_parser(name)
        one.add_argument(option, type=Path, required=True, metavar="DIR", help=text)
        one.add_argument("--hf", type=Path, required=True, metavar="DIR", help="model that the adapter began with")
        one.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write")
        one.add_argument("--overwrite", action="store_true", help="replace DIR if a conversion wrote it")
    options = vars(parser.parse_args(arguments))
    command = {"merge": merge, "extract": extract}[options.pop("command")]
    return run(parser.prog, partial(command, **options))


if __name__ == "__main__":
    sys.exit(main())
