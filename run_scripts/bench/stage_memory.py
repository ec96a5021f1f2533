"""Peak memory of the learner process for growing stages: it should not grow with the stage.

    python run_scripts/bench/stage_memory.py [--responses 1000 10000 100000] [--tokens 20]

For each size it writes a sealed stage of synthetic responses into a run directory. `mugrpo optimize` then takes all of
its updates of 256 responses in one process, on a random Qwen2 of 100k parameters.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tomli_w
import torch
from store import GROUP, PROMPTS_PER_UPDATE, synthetic_group
from transformers import Qwen2ForCausalLM

from mugrpo_megatron.commands.sft import model_config
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.record import claim
from mugrpo_megatron.stages.manifest import Origin
from mugrpo_megatron.stages.store import StageStore

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--tokens", type=int, default=20, help="mean response length; uniform up to twice it")
    options = parser.parse_args()
    print("responses  updates  file MiB  peak MiB  seconds")
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = make_model(Path(folder) / "model")
        for responses in options.responses:
            measure(Path(folder), max(1, responses // (GROUP * PROMPTS_PER_UPDATE)), options.tokens, vocabulary)


def make_model(directory: Path) -> int:
    """Write a random checkpoint with the bundled tokenizer; returns its vocabulary."""
    shape = {"hidden": 64, "ffn": 128, "layers": 2, "heads": 4, "kv_heads": 2}
    recipe = Recipe.model_validate({"model": {"path": str(directory)}, "sft": shape})
    tokenizer = build_arithmetic_tokenizer()
    torch.manual_seed(0)
    Qwen2ForCausalLM(model_config(recipe, tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return len(tokenizer)


def measure(folder: Path, updates: int, tokens: int, vocabulary: int) -> None:
    """Take every update of one synthetic stage, and print a line."""
    run_dir = folder / f"updates-{updates}"
    run_dir.mkdir()
    store = StageStore(run_dir / "stages" / "00000", origin=Origin(claim(run_dir).id, 0, 0))
    generator = np.random.default_rng(0)
    for index in range(updates * PROMPTS_PER_UPDATE):
        store.append(synthetic_group(index, tokens, generator, vocabulary))
    store.flush()
    store.seal(updates, PROMPTS_PER_UPDATE)
    size = sum(path.stat().st_size for path in store.directory.iterdir()) / 2**20
    recipe = folder / "recipe.toml"
    recipe.write_text(tomli_w.dumps(sections(folder, run_dir, updates, tokens)), encoding="utf-8")
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "mugrpo_megatron", "optimize", str(recipe)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"mugrpo optimize ended with status {status}")
    print(
        f"{updates * PROMPTS_PER_UPDATE * GROUP:9d}  {updates:7d}  {size:8.1f}  {usage.ru_maxrss / 1024:8.0f}  "
        f"{time.perf_counter() - start:7.1f}",
        flush=True,
    )


def sections(folder: Path, run_dir: Path, updates: int, tokens: int) -> dict[str, dict[str, object]]:
    """A recipe of one stage of that many updates."""
    return {
        "run": {"dir": str(run_dir)},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"max_prompt_tokens": 32},
        "schedule": {"stages": 1, "updates_per_stage": updates},
        "rollout": {
            "prompts_per_update": PROMPTS_PER_UPDATE,
            "responses_per_prompt": GROUP,
            "max_response_tokens": 2 * tokens,
        },
        "learner": {"threads": 1},
        "track": {"tensorboard": False},
    }


if __name__ == "__main__":
    main()
