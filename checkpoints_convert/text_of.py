"""Take the text out of a vision-language checkpoint, or put one back into it: `mugrpo convert text_of --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoints_convert.command import fill_hf, fingerprint, run
from checkpoints_convert.output import checked_output, open_output
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.files.hf_config import CONFIG, read_config
from mugrpo_megatron.files.vocabulary import check_carried
from mugrpo_megatron.weights.families import architecture
from mugrpo_megatron.weights.hf import SHARD_BYTES, carried_files, check_finite, copy_files
from mugrpo_megatron.weights.safetensors_dir import (
    HEAD,
    TensorSpec,
    WeightFile,
    check_tensors,
    divide,
    open_checkpoint,
    scan,
)

TEXTS = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
"""`model_type` of a model with a vision tower -> transformers' class of its text model."""
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def convert(
    hf: Path, out: Path, text: Path | None = None, shard_bytes: int = SHARD_BYTES, overwrite: bool = False
) -> None:
    """Write the text model in the vision-language checkpoint `hf`; with `text`, write `hf` with the weights of `text`
    in it.

    Every tensor keeps its dtype, the one in `hf` if both have it. Peak memory is the largest tensor. Raises UserError,
    with nothing written, for a directory that is damaged or of another model, and for an `out` that must not be
    replaced.
    """
    out = checked_output(out, {"--hf": hf, **({"--put": text} if text else {})}, overwrite)
    given = read_config(hf)
    config = text_config(given, hf / CONFIG)
    model = architecture(config, f"{hf / CONFIG}: text_config")
    source = scan(hf, lambda name: True)
    # With tied weights the output layer is left out: a stored copy would differ once the embedding is trained.
    stored = [name for name in source.files if not (model.tied and name == HEAD)]
    names = {text_name(name): name for name in stored if text_name(name)}
    if packed := next((name for name in names.values() if name.endswith(".experts.gate_up_proj")), None):
        raise UserError(
            f"{hf / source.files[packed]}: {packed} packs all experts of a layer, which is not supported; "
            "store each expert alone"
        )
    files = {name: source.files[old] for name, old in names.items()}
    shapes = {name: source.shapes[old] for name, old in names.items()}
    check_tensors(hf, files, shapes, model)
    replacement = open_checkpoint(text, model) if text else None
    if replacement:
        kept = {name: name for name in stored}
    else:
        kept = names
        counts = Counter(name.removeprefix("model.").split(".")[0] for name in stored if not text_name(name))
        parts = (f"{count} tensors of {part}" for part, count in sorted(counts.items()))
        print("left out:", ", ".join(parts) or "none")
    specs = [TensorSpec(name, source.shapes[old], source.dtypes[old]) for name, old in kept.items()]
    shards = divide(specs, shard_bytes)

    def tensors(shard: WeightFile) -> Iterator[torch.Tensor]:
        for spec in shard.specs:
            name = text_name(spec.name)
            of, name = (replacement, name) if replacement and name in replacement.files else (source, kept[spec.name])
            tensor = of.read(name)
            check_finite(of, name, tensor)
            yield tensor

    carried = carried_files(hf, PROCESSORS if text else ())
    check_carried(hf, carried)
    recipe = {"source": fingerprint(hf), "text": fingerprint(text) if text else None, "shards": len(shards)}
    with open_output(out, recipe, sum(shard.bytes for shard in shards), overwrite) as output:
        fill_hf(output, "text", shards, tensors)
        copy_files(hf, output.directory, carried)
        written = json.dumps(given if text else config, indent=2, ensure_ascii=False)
        write_text(output.directory / CONFIG, written + "\n")


def text_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config of the text model in `config`, which was read from `path`; UserError if the family is not
    supported."""
    family, nested = config["model_type"], config.get("text_config")
    if family not in TEXTS or not isinstance(nested, dict):
        raise UserError(f"{path}: model_type {family!r} has no text to take out; the families are {', '.join(TEXTS)}")
    shared = {name: config[name] for name in ("tie_word_embeddings", "dtype") if name in config}
    return {**shared, **nested, "architectures": [TEXTS[family]]}


def text_name(name: str) -> str:
    """The name that a tensor has in the text model's checkpoint; "" for tensors of vision and multi-token
    prediction."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name if name == HEAD else ""


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mugrpo convert text_of", description=__doc__.partition(":")[0])
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="vision-language checkpoint to read")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="Hugging Face directory to write")
    parser.add_argument(
        "--put",
        type=Path,
        metavar="TEXT_DIR",
        help="write the checkpoint --hf with the weights of this text model instead",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if a conversion wrote it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser()
    options = parser.parse_args(arguments)
    command = partial(convert, text=options.put, overwrite=options.overwrite)
    return run(parser.prog, partial(command, options.hf, options.out))


if __name__ == "__main__":
    sys.exit(main())
