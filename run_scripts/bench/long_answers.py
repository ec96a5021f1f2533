"""Seconds of training on responses of about 105 tokens: our GRPO and mu-GRPO against TRL's GRPOTrainer.

    PYTHONPATH=DIR python -m run_scripts.bench.long_answers --out long.json              # hours; quiet machine
    PYTHONPATH=DIR python -m run_scripts.bench.long_answers --updates 8 4 --fastest-goes-on --before OTHER_CHECKOUT

DIR holds TRL; `sides` says how it gets there. Models are random Qwen2 of two sizes with the bundled tokenizer of bytes:
a response ends with probability 1/300 after each token, and is cut at 128. The reward is one that any text has.
TRL runs in float32 and bfloat16, each with both implementations of attention; its best counts. With
`--fastest-goes-on`, only the way that was fastest in the first round runs in the later ones. `--before` runs another
checkout of this project, with this one's recipe, in the same turns. Sides take turns, and each figure is the median of
`--repeats` runs. The machine's load is printed next to it; results are written after each run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.observe.environment import environment
from run_scripts.bench.clock import CPU, WALL
from run_scripts.bench.sides import ROOT, Job, Result, run_ours, run_trl
from tests.models import save_model

BASE = Path(__file__).with_suffix(".toml")
SIZES = {
    "0.8M": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8},
    "10M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8},
}
TRL_WAYS = [f"{dtype}-{attention}" for dtype in ("float32", "bfloat16") for attention in ("sdpa", "eager")]

Sides = dict[str, list[Result]]
"""Side -> its runs."""


def main() -> None:
    options = _options()
    found: dict[str, Sides] = {}
    with TemporaryDirectory() as folder:
        for size, updates in zip(options.sizes, options.updates, strict=True):
            model = _save(Path(folder) / size, size)
            job = Job(str(BASE), str(model), updates, min(options.mu, updates), rate=1e-4, evaluations=0)
            sides = found[size] = defaultdict(list)
            ways = options.ways
            for repeat in range(options.repeats):
                for name, run in _round(job, ways, options.before):
                    busy = psutil.getloadavg()[0]
                    sides[name].append(run())
                    seconds = sides[name][-1].points[-1][WALL]
                    print(f"{size}, {name}: {seconds:.1f} s, round {repeat + 1}, load {busy:.1f} before", flush=True)
                    _write(options, found)
                if options.fastest_goes_on:
                    ways = sorted(ways, key=lambda way: _seconds(sides[f"TRL, {way}"]))[:1]
            _print(size, updates, sides)


def _round(job: Job, ways: Sequence[str], before: Path | None) -> Iterator[tuple[str, Callable[[], Result]]]:
    """One run of each side; ours with a stage for every µ updates, and with one stage for all of them."""
    whole = replace(job, mu=job.updates)
    for name, checkout in {"ours": ROOT, **({"before": before} if before else {})}.items():
        yield f"{name}, GRPO µ={job.mu}", partial(run_ours, job, "grpo", checkout)
        if whole != job:
            yield f"{name}, mu-GRPO µ={whole.mu}", partial(run_ours, whole, "mu_grpo", checkout)
    for way in ways:
        dtype, attention = way.split("-")
        yield f"TRL, {way}", partial(run_trl, replace(job, dtype=dtype, attention=attention))


def _seconds(runs: Sequence[Result]) -> float:
    return statistics.median(run.points[-1][WALL] for run in runs)


def _write(options: argparse.Namespace, found: dict[str, Sides]) -> None:
    if options.out:
        figures = {
            size: {
                "updates": updates,
                "seconds": {name: [run.points[-1][WALL : CPU + 1] for run in runs] for name, runs in sides.items()},
                "parts": {name: [run.parts for run in runs] for name, runs in sides.items()},
            }
            for (size, sides), updates in zip(found.items(), options.updates, strict=False)
        }
        text = {"environment": environment(), "mu": options.mu, "sizes": figures}
        options.out.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def _print(size: str, updates: int, sides: Sides) -> None:
    wall = {name: _seconds(runs) for name, runs in sides.items()}
    best = min((seconds for name, seconds in wall.items() if name.startswith("TRL")), default=math.nan)
    print(f"\n{size}, {updates} updates: median seconds of training, and TRL's best over it ({os.cpu_count()} cores)")
    for name, runs in sides.items():
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in runs[-1].parts.items())
        print(
            f"  {name:26} {wall[name]:7.1f} s  {best / wall[name]:5.2f}  of {len(runs)}   last run: {parts}", flush=True
        )


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
    parser.add_argument("--updates", type=int, nargs="+", default=[16], help="of all sizes, or of each")
    parser.add_argument("--mu", type=int, default=4, help="updates between two generations, of TRL and of our GRPO")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=TRL_WAYS, choices=TRL_WAYS, help="how TRL computes")
    parser.add_argument("--fastest-goes-on", action="store_true", help="after the first round only TRL's fastest way")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout of this project to run, too")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    if len(options.updates) == 1:
        options.updates *= len(options.sizes)
    if len(options.updates) != len(options.sizes):
        parser.error("--updates takes one number, or one for each of --sizes")
    if options.before:
        options.before = options.before.resolve()
    return options


if __name__ == "__main__":
    main()
