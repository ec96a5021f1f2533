"""Seconds of training on responses of about 105 tokens: our GRPO and mu-GRPO against TRL's GRPOTrainer.

    PYTHONPATH=DIR python -m run_scripts.bench.long_answers --out long.json        # hours; quiet machine
    PYTHONPATH=DIR python -m run_scripts.bench.long_answers --sizes 0.8M --updates 16 --repeats 1

DIR holds TRL; `sides` says how it gets there. Models are random Qwen2 of two sizes with the bundled tokenizer of bytes:
a response ends with probability 1/300 after each token, and is cut at 128. The reward is one that any text has.
TRL runs in float32 and bfloat16, each with both implementations of attention; its best counts. Sides take turns, and
each figure is the median of `--repeats` runs. What else used the machine is printed next to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.observe.environment import environment
from run_scripts.bench.clock import CPU, WALL
from run_scripts.bench.sides import Job, Result, run_ours, run_trl
from tests.models import save_model

BASE = Path(__file__).with_suffix(".toml")
SIZES = {
    "0.8M": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8},
    "10M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8},
}
TRL_WAYS = [(dtype, attention) for dtype in ("float32", "bfloat16") for attention in ("sdpa", "eager")]


def main() -> None:
    options = _options()
    found: dict[str, dict[str, list[Result]]] = {}
    with TemporaryDirectory() as folder:
        for size in options.sizes:
            model = _save(Path(folder) / size, size)
            found[size] = defaultdict(list)
            for repeat in range(options.repeats):
                busy = psutil.getloadavg()[0]
                for name, result in _round(options, str(model)):
                    found[size][name].append(result)
                    print(f"{size}, {name}: {result.points[-1][WALL]:.1f} s, load {busy:.1f} before round {repeat + 1}")
            _print(size, found[size])
    if options.out:
        figures = {
            size: {name: [run.points[-1][WALL : CPU + 1] for run in runs] for name, runs in sides.items()}
            for size, sides in found.items()
        }
        text = {"environment": environment(), "updates": options.updates, "mu": options.mu, "seconds": figures}
        options.out.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def _round(options: argparse.Namespace, model: str) -> Iterator[tuple[str, Result]]:
    """One run of each side; ours with a stage for every µ updates, and with one stage for all of them."""
    job = Job(str(BASE), model, options.updates, options.mu, rate=1e-4, evaluations=0)
    yield f"ours, GRPO µ={job.mu}", run_ours(job, "grpo")
    yield f"ours, mu-GRPO µ={job.updates}", run_ours(replace(job, mu=job.updates), "mu_grpo")
    for dtype, attention in TRL_WAYS:
        yield f"TRL, {dtype}, {attention}", run_trl(replace(job, dtype=dtype, attention=attention))


def _print(size: str, sides: dict[str, list[Result]]) -> None:
    wall = {name: statistics.median(run.points[-1][WALL] for run in runs) for name, runs in sides.items()}
    best = min(seconds for name, seconds in wall.items() if name.startswith("TRL"))
    print(f"\n{size}: median seconds of training, and TRL's best over it ({os.cpu_count()} cores)")
    for name, runs in sides.items():
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in runs[-1].parts.items())
        print(f"  {name:24} {wall[name]:7.1f} s  {best / wall[name]:5.2f}   last run: {parts}")


def _save(directory: Path, size: str) -> Path:
    tokenizer = build_arithmetic_tokenizer()
    heads = SIZES[size]["num_attention_heads"]
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save_model(
        directory,
        scale=None,
        **{**SIZES[size], **special, "num_key_value_heads": heads, "vocab_size": len(tokenizer)},
        tie_word_embeddings=True,
    )
    tokenizer.save_pretrained(directory)
    return directory


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--mu", type=int, default=4, help="updates between two generations, of TRL and of our GRPO")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
