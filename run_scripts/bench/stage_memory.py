"""Peak memory of the learner process for growing stages: it should not grow with the stage.

    python run_scripts/bench/stage_memory.py [--responses 1000 10000 100000] [--tokens 20] [--routes]

For each size it writes a sealed stage of synthetic responses into a run directory. `mugrpo optimize` then takes all of
its updates of 256 responses in one process, on a random Qwen2 of 100k parameters. With `--routes` the model is a
mixture of experts, and each size is measured twice: without routes, and with the engine's (64 bytes a token, checked
against the size of their file), which the learner replays (`learner.routing_replay = "rollout"`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from store import GROUP, PROMPTS_PER_UPDATE, synthetic_group
from transformers import PreTrainedModel, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mugrpo_megatron.commands.sft import model_config
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.record import claim
from mugrpo_megatron.samples import HeldRoutes, Sample
from mugrpo_megatron.stages.manifest import Origin
from mugrpo_megatron.stages.routes import NAMES
from mugrpo_megatron.stages.store import StageStore

ROOT = Path(__file__).parents[2]
LAYERS, EXPERTS, CHOSEN = 8, 64, 8
KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "eos_token_id", "tie_word_embeddings",
)  # fmt: skip
"""Of the dense model's configuration."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--tokens", type=int, default=20, help="mean response length; uniform up to twice it")
    parser.add_argument("--routes", action="store_true", help="a mixture of experts that replays routes")
    options = parser.parse_args()
    print("responses  updates  routes  stage MiB  routes MiB  computed MiB  peak MiB  seconds")
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = make_model(Path(folder) / "model", options.routes)
        for responses in options.responses:
            updates = max(1, responses // (GROUP * PROMPTS_PER_UPDATE))
            for routes in (False, True)[: 1 + options.routes]:
                measure(Path(folder), updates, options.tokens, vocabulary, routes)


def make_model(directory: Path, experts: bool) -> int:
    """Write a random checkpoint with the bundled tokenizer; returns its vocabulary."""
    shape = {"hidden": 64, "layers": 2}
    recipe = Recipe.model_validate({"model": {"path": str(directory)}, "sft": shape})
    tokenizer = build_arithmetic_tokenizer()
    torch.manual_seed(0)
    dense = model_config(recipe, tokenizer)
    model: PreTrainedModel = Qwen2ForCausalLM(dense)
    if experts:
        config: dict[str, Any] = {name: getattr(dense, name) for name in KEPT}
        config |= {"head_dim": 16, "num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config, moe_intermediate_size=16))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return len(tokenizer)


def with_routes(samples: list[Sample], generator: np.random.Generator) -> list[Sample]:
    """The samples as an engine returns them that was asked for its routes: random ones."""
    shapes = [(LAYERS, sample.tokens - 1, CHOSEN) for sample in samples]
    first = [generator.integers(0, EXPERTS, shape, dtype=np.uint8)[..., :1] for shape in shapes]
    routes = [HeldRoutes((each + np.arange(CHOSEN, dtype=np.uint8)) % EXPERTS) for each in first]
    return [replace(sample, routes=each) for sample, each in zip(samples, routes, strict=True)]


def measure(folder: Path, updates: int, tokens: int, vocabulary: int, routes: bool) -> None:
    """Take every update of one synthetic stage, and print a line."""
    run_dir = folder / f"updates-{updates}{'-routes' * routes}"
    run_dir.mkdir()
    store = StageStore(run_dir / "stages" / "00000", origin=Origin(claim(run_dir).id, 0, 0))
    generator, routed = np.random.default_rng(0), 0
    for index in range(updates * PROMPTS_PER_UPDATE):
        group = synthetic_group(index, tokens, generator, vocabulary)
        store.append(with_routes(group, generator) if routes else group)
        routed += sum(sample.tokens - 1 for sample in group)
    store.flush()
    store.seal(updates, PROMPTS_PER_UPDATE)
    size = sum(path.stat().st_size for path in store.directory.iterdir()) / 2**20
    file = store.directory / NAMES["rollout"]
    stored = file.stat().st_size if routes else 0
    checksums = LAYERS * updates * PROMPTS_PER_UPDATE * GROUP
    computed = LAYERS * CHOSEN * routed + 4 * checksums if routes else 0
    assert stored == computed, "a byte for each expert of each layer"
    recipe = folder / "recipe.toml"
    recipe.write_text(tomli_w.dumps(sections(folder, run_dir, updates, tokens, routes)), encoding="utf-8")
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "mugrpo_megatron", "optimize", str(recipe)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"mugrpo optimize ended with status {status}")
    print(
        f"{updates * PROMPTS_PER_UPDATE * GROUP:9d}  {updates:7d}  {'with' if routes else 'no':>6}  {size:9.1f}  "
        f"{stored / 2**20:10.2f}  {computed / 2**20:12.2f}  {usage.ru_maxrss / 1024:8.0f}  "
        f"{time.perf_counter() - start:7.1f}",
        flush=True,
    )


def sections(folder: Path, run_dir: Path, updates: int, tokens: int, routes: bool) -> dict[str, dict[str, object]]:
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
        "learner": {"threads": 1, "routing_replay": "rollout" if routes else "off"},
        "track": {"tensorboard": False},
    }


if __name__ == "__main__":
    main()
