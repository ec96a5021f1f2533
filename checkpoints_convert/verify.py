"""Compare two checkpoints, bitwise and by their log-probabilities: `mugrpo convert verify --help`."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from checkpoints_convert.command import (
    MEGABYTE,
    advance,
    check_model,
    check_sums,
    compare_configs,
    noted_architecture,
    read_parameter,
    run,
)
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.tensors import raw_bytes
from mugrpo_megatron.files.torch_dist import Reader
from mugrpo_megatron.observe.progress import open_display
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.config import transformers_config
from mugrpo_megatron.weights.hf import check_tokenizer
from mugrpo_megatron.weights.safetensors_dir import HFCheckpoint, open_checkpoint
from mugrpo_megatron.weights.table import entries, merge_from_hf, whole_shape

TOLERANCE = 1e-4
"""Largest difference of log-probabilities that counts as equal; both sides are computed in float32."""
PROMPTS, TOKENS = 4, 32


def verify(hf: Path, megatron: Path, logits: bool = True) -> str:
    """Compare two checkpoints and return the line to print: config fields, all tensors bitwise, and log-probabilities.

    The log-probabilities are those of fixed prompts. If the conversion cast the weights, the cast weights are compared.
    Raises UserError with the first difference.
    """
    architecture = noted_architecture(hf)
    check_tokenizer(hf, architecture)
    checkpoint = open_checkpoint(hf, architecture)
    fields = compare_configs(megatron, hf)
    reader = Reader(megatron)
    check_model(reader, megatron, architecture, hf)
    check_sums(megatron, reader.files)
    tensors, digest = compare_tensors(checkpoint, reader, megatron, architecture)
    line = f"equal: {fields} config fields, {tensors} tensors, sha256 {digest}"
    if logits:
        line += f", log-probabilities within {compare_logits(hf, megatron, architecture):.1e}"
    return line


def compare_tensors(
    checkpoint: HFCheckpoint, reader: Reader, megatron: Path, architecture: Architecture
) -> tuple[int, str]:
    """Compare all tensors bitwise; returns their number, and a checksum over them in the model's order."""
    sums = hashlib.sha256()
    table = entries(architecture).values()
    sizes = [torch.Size(whole_shape(e, architecture)).numel() * checkpoint.dtypes[e.hf[0]].itemsize for e in table]
    done = tensors = 0
    with open_display() as display, display.bar("comparing", sum(sizes) // MEGABYTE, "MB") as bar:
        for entry, size in zip(table, sizes, strict=True):
            theirs = read_parameter(reader, entry, architecture)
            ours = merge_from_hf(entry, [checkpoint.read(name) for name in entry.hf], architecture)
            ours = ours.to(theirs.dtype)
            if not torch.equal(ours, theirs):
                differ = int((ours != theirs).sum())
                raise UserError(
                    f"{entry.megatron} ({', '.join(entry.hf)}) differs in {differ} of {ours.numel()} values "
                    f"between {checkpoint.directory} and {megatron}"
                )
            sums.update(raw_bytes(ours))
            tensors += len(entry.hf)
            advance(bar, done := done + size)
    return tensors, sums.hexdigest()[:16]


def compare_logits(hf: Path, megatron: Path, architecture: Architecture) -> float:
    """The largest difference between log-probabilities of transformers and of the Megatron learner.

    The two models are loaded one after the other.
    """
    prompts = [
        [(31 * row + 7 * position * position + 3 * position) % architecture.vocab_size for position in range(TOKENS)]
        for row in range(PROMPTS)
    ]
    expected = transformers_logprobs(hf, architecture, prompts)
    difference = float((megatron_logprobs(hf, megatron, architecture, prompts) - expected).abs().max())
    if not difference < TOLERANCE:
        raise UserError(
            f"the weights of {hf} and {megatron} are equal but their log-probabilities differ by {difference:.1e}: "
            f"the learner does not compute what the config describes"
        )
    return difference


@torch.no_grad()
def transformers_logprobs(hf: Path, architecture: Architecture, prompts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of transformers' model, float32 [prompts, tokens, vocabulary]."""
    from transformers import AutoModelForCausalLM  # takes seconds to import; not needed with --no-logits
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        hf,
        config=transformers_config(hf, architecture),
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
    ).eval()
    return model(torch.tensor(prompts)).logits.log_softmax(-1)


def megatron_logprobs(hf: Path, megatron: Path, architecture: Architecture, prompts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the learner's model with weights of a distributed checkpoint, float32 [prompts, tokens,
    vocabulary]."""
    import numpy as np

    from mugrpo_megatron.learner.attention import make_packing
    from mugrpo_megatron.learner.checkpoint import load_model
    from mugrpo_megatron.learner.groups import initialize, shutdown
    from mugrpo_megatron.learner.model import build_model, policy
    from mugrpo_megatron.recipe import Recipe

    recipe = Recipe.model_validate({"model": {"path": hf, "dtype": "float32"}})
    ranks = initialize(recipe.run, recipe.parallel)
    (wrapped,) = build_model(recipe.model, recipe.parallel, recipe.learner, architecture, ranks)
    chunk = policy(wrapped)
    load_model([chunk], megatron)
    chunk.eval()
    ids = torch.tensor(prompts, device=ranks.device).view(1, -1)
    positions = torch.arange(TOKENS, device=ranks.device).repeat(len(prompts))[None]
    packing = make_packing(np.full(len(prompts), TOKENS), ranks.device)
    with torch.no_grad():
        hidden = chunk(ids, positions, attention_mask=None, packed_seq_params=packing).squeeze(1)
        logits = hidden @ chunk.output_weight()[: architecture.vocab_size].T
    shutdown()
    return logits.view(len(prompts), TOKENS, -1).log_softmax(-1).cpu()


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mugrpo convert verify", description=__doc__.partition(":")[0])
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint")
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="distributed checkpoint")
    parser.add_argument(
        "--no-logits",
        dest="logits",
        action="store_false",
        help="do not compare log-probabilities, for which both models are loaded",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser()
    options = parser.parse_args(arguments)

    def command() -> None:
        print(verify(options.hf, options.megatron, options.logits))

    return run(parser.prog, command)


if __name__ == "__main__":
    sys.exit(main())
