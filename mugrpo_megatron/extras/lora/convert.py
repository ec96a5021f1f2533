"""Merge an adapter into its model, or extract one from a training checkpoint: `... convert --help`.

python -m mugrpo_megatron.extras.lora.convert merge --hf DIR --adapter DIR --out DIR
python -m mugrpo_megatron.extras.lora.convert extract --megatron DIR --hf DIR --out DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from checkpoints_convert.command import check_sums, fill_hf, fingerprint, run
from checkpoints_convert.output import checked_output, open_output
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.lora.low_rank import merge as merged
from mugrpo_megatron.extras.lora.peft_files import adapter_files, check_base, read_adapter
from mugrpo_megatron.extras.lora.targets import Leaf, adapted_rows, leaves_of, target_kinds
from mugrpo_megatron.files.checkpoint_state import read_state
from mugrpo_megatron.files.durable import write_content
from mugrpo_megatron.files.torch_dist import Reader
from mugrpo_megatron.weights import families
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import read_architecture
from mugrpo_megatron.weights.hf import SHARD_BYTES, carry_files, check_tokenizer
from mugrpo_megatron.weights.safetensors_dir import HFCheckpoint, TensorSpec, WeightFile, divide, open_checkpoint
from mugrpo_megatron.weights.table import ADAPTER, Entry, entries, stored

REMEDY = "copy it again, or take another checkpoint of its run"
"""Way out of a damaged checkpoint."""


def merge(hf: Path, adapter: Path, out: Path, overwrite: bool = False) -> None:
    """Write to `out` the checkpoint in `hf` with the adapter merged into it, one tensor after another.

    A and B are rounded to W's dtype. Then W + alpha / r B A is computed in float32 and rounded to that dtype.

    Raises UserError, with nothing written, for an adapter that does not fit or was trained on other weights.
    """
    out = checked_output(out, {"--hf": hf, "--adapter": adapter}, overwrite)
    architecture = read_architecture(hf)
    check_tokenizer(hf, architecture)
    checkpoint = open_checkpoint(hf, architecture)
    file = read_adapter(adapter, architecture, "--adapter")
    check_base(file, hf, "--adapter")
    scale = file.alpha / file.rank
    factors = _by_weight(architecture, file.kinds, file.read())
    specs = [
        TensorSpec(name, shape, checkpoint.dtypes[name])
        for entry in entries(architecture).values()
        for name, shape in zip(entry.hf, entry.hf_shapes(architecture), strict=True)
    ]
    shards = divide(specs, SHARD_BYTES)
    recipe = {"source": fingerprint(hf), "adapter": fingerprint(adapter), "shards": [shard.file for shard in shards]}
    with open_output(out, recipe, sum(shard.bytes for shard in shards), overwrite) as output:
        fill_hf(output, "adapter", shards, lambda shard: _merged(checkpoint, shard, factors, scale))
        carry_files(hf, output.directory, specs[0].dtype)


def _merged(
    checkpoint: HFCheckpoint, shard: WeightFile, factors: Mapping[str, Sequence[torch.Tensor]], scale: float
) -> Iterator[torch.Tensor]:
    for spec in shard.specs:
        weight = checkpoint.read(spec.name)
        if spec.name in factors:
            # In the weight's dtype, as in the learner: so the merged weight is the one that the run trained with.
            a, b = (factor.to(weight.dtype) for factor in factors[spec.name])
            weight = merged(weight, a, b, scale).to(weight.dtype)
            if not weight.isfinite().all():
                raise UserError(
                    f"{spec.name}: with the adapter a value does not fit {weight.dtype}; copy the adapter again"
                )
        yield weight


def _adapted(architecture: Architecture, kinds: Sequence[str]) -> Iterator[tuple[Entry, Leaf]]:
    """Yield (the table's entry of a weight, a layer in it that has an adapter); of a layer's experts, only the first
    one's entry."""
    rows = adapted_rows(architecture)
    for entry in entries(architecture).values():
        if entry.row in rows and entry.expert == 0:
            leaves = leaves_of(entry.row, entry.layer, architecture, kinds)
            yield from ((entry, leaf) for leaf in leaves if leaf.kind in kinds)


def _by_weight(
    architecture: Architecture, kinds: Sequence[str], factors: Mapping[str, torch.Tensor]
) -> dict[str, list[torch.Tensor]]:
    """Name of each tensor of the model's checkpoint that the adapter changes -> its factors A and B."""
    factors_of = {}
    for entry, leaf in _adapted(architecture, kinds):
        a, b = factors[leaf.a], factors[leaf.b]
        if not leaf.experts:
            factors_of[f"{leaf.name}.weight"] = [a, b]
            continue
        for expert in range(leaf.experts):
            expert_a, expert_b = leaf.of_expert(a, b, expert)
            names = replace(entry, expert=expert).hf
            factors_of |= {
                name: [expert_a, rows] for name, rows in zip(names, expert_b.chunk(leaf.tensors), strict=True)
            }
    return factors_of


def extract(megatron: Path, hf: Path, out: Path, overwrite: bool = False) -> None:
    """Write to `out`, in PEFT's format, the adapter in a run's checkpoint; `hf` is the model that the run began with.

    Raises UserError, with nothing written, for a checkpoint without adapters, of another model, or damaged.
    """
    out = checked_output(out, {"--megatron": megatron, "--hf": hf}, overwrite)
    architecture, model = read_architecture(hf), read_state(megatron)["model"]
    if "lora_rank" not in model:
        raise UserError(f"{megatron} has no adapters: all weights are in it; use checkpoints_convert.megatron_to_hf")
    if model.get("base") != families.fingerprint(hf):
        raise UserError(
            f"{megatron} has adapters that were trained on other weights than those in {hf}; name the model that its "
            "run began with"
        )
    reader = Reader(megatron)
    check_sums(megatron, reader.files)
    try:
        rank, alpha, targets = int(model["lora_rank"]), float(model["lora_alpha"]), str(model["lora_targets"]).split()
    except KeyError as error:
        raise UserError(f"{megatron} is damaged: its state has no {error}; {REMEDY}") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{megatron} is damaged: lora_rank or lora_alpha is no number ({error}); {REMEDY}") from None
    kinds = target_kinds(architecture, targets, f"{megatron}: lora_targets")
    tensors: dict[str, torch.Tensor] = {}
    for entry, leaf in _adapted(architecture, kinds):
        (place,) = stored(entry, architecture)
        above, _, layer = place.key.removesuffix(".weight").rpartition(".")
        experts = (leaf.experts,) if leaf.experts else ()
        index = place.index[: len(place.index) - len(experts)]
        a, b = (
            reader.read(f"{above}.{ADAPTER}{layer}.{factor}.{leaf.kind}", index, (*experts, *shape))
            for factor, shape in (("a", (rank, leaf.inputs)), ("b", leaf.shape_of_b(leaf.outputs, rank)))
        )
        tensors |= leaf.named(a, b)
    files = adapter_files(tensors, rank, alpha, kinds, hf, str(model["base"]))
    recipe = {"source": fingerprint(megatron), "like": fingerprint(hf)}
    with open_output(out, recipe, sum(tensor.nbytes for tensor in tensors.values()), overwrite) as output:
        for name, content in files.items():
            write_content(output.directory / name, content)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="convert", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name, option, text in (
        ("merge", "--adapter", "adapter in PEFT's format"),
        ("extract", "--megatron", "checkpoint of a run with [lora]"),
    ):
        subparser = commands.add_parser(name)
        subparser.add_argument(option, type=Path, required=True, metavar="DIR", help=text)
        subparser.add_argument(
            "--hf", type=Path, required=True, metavar="DIR", help="model that the adapter began with"
        )
        subparser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write")
        subparser.add_argument("--overwrite", action="store_true", help="replace DIR if a conversion wrote it")
    options = vars(parser.parse_args(arguments))
    command = {"merge": merge, "extract": extract}[options.pop("command")]
    return run(parser.prog, partial(command, **options))


if __name__ == "__main__":
    sys.exit(main())
