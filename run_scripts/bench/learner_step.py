"""Seconds of one update of the learner against a bare PyTorch step of the same model on the same responses.

    python -m run_scripts.bench.learner_step [--sizes 0.8M 10M short] [--threads 2] [--repeats 5]

`0.8M` and `10M` have the models and responses of `long_answers`: 16 prompts x 8 responses of about 105 tokens; `short`
is 32 x 8 answers of five tokens with the smaller model. Each side runs in a process of its own and takes the same
update several times. `ours` is `learner.update.update` with everything in it: packing, Megatron's schedule, loss,
AdamW, diagnostics. `bare` is transformers' Qwen2 with SDPA, without padding masks: rows sorted by length are padded to
the longest of their micro-batch; logits of response tokens only, log-softmax, the same clipped loss, the gradient
norm, and torch's fused AdamW. It is the fastest of `--rows` in a micro-batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from mugrpo_megatron.cpu.heap import keep_freed_memory
from mugrpo_megatron.samples import Sample

SHAPES = {
    "0.8M": ("0.8M", 16, 22, 128, 1 / 300),
    "10M": ("10M", 16, 22, 128, 1 / 300),
    "short": ("0.8M", 32, 8, 5, 0.0),
}
"""Name -> model of `long_answers`, prompts, tokens of a prompt, most tokens of a response, chance of an end at each."""
RESPONSES = 8
CLIP = (0.8, 1.2)


def main() -> None:
    options = _options()
    if options.one:
        keep_freed_memory()  # as the command does, here for both sides
        print(json.dumps(_measure(options)))
        return
    print(f"torch {torch.__version__}, {options.threads} threads, {options.repeats} updates after two; median seconds")
    for size in options.sizes:
        with TemporaryDirectory() as folder:
            _save(Path(folder), size)
            found = {name: _alone(options, size, folder, name) for name in ("ours", *map(str, options.rows))}
        name, bare = min(((rows, found[rows]) for rows in map(str, options.rows)), key=lambda one: one[1]["seconds"])
        ours = found["ours"]
        rate = ours["tokens"] / ours["seconds"]
        print(
            f"{size:6} ours {ours['seconds']:.3f} s (loss {ours['loss']:.6f}, norm {ours['norm']:.5f}, {rate:,.0f} "
            f"tokens/s), bare {bare['seconds']:.3f} s in micro-batches of {name} rows (loss {bare['loss']:.6f}, norm "
            f"{bare['norm']:.5f}): ours takes {ours['seconds'] / bare['seconds']:.2f} of it; "
            + ", ".join(f"{rows} rows {found[rows]['seconds']:.3f} s" for rows in map(str, options.rows))
        )


def make_update(size: str) -> tuple[list[Sample], np.ndarray]:
    """Random responses of the size's shape, and their advantages."""
    _, prompts, prompt, limit, end = SHAPES[size]
    rng = np.random.default_rng(0)
    lengths = (
        rng.geometric(end, prompts * RESPONSES) if end else rng.integers(limit - 1, limit + 1, prompts * RESPONSES)
    )
    asked = [rng.integers(1, 255, prompt + rng.integers(-2, 3)).astype(np.int32) for _ in range(prompts)]
    samples = []
    for index, length in enumerate(np.minimum(lengths, limit).tolist()):
        group = index // RESPONSES
        answer = rng.integers(1, 255, length).astype(np.int32)
        logprobs = rng.normal(-5.6, 0.3, length).astype(np.float32)
        samples.append(Sample(group, str(group), asked[group], answer, logprobs, 0.0, 0, "stop"))
    return samples, rng.normal(size=len(samples)).astype(np.float32)


def ours(options: argparse.Namespace) -> tuple[Callable[[], tuple[float, float]], int]:
    """One update of the learner -> loss, gradient norm; and its tokens."""
    from mugrpo_megatron.learner.learner import build_learner
    from mugrpo_megatron.learner.update import update
    from mugrpo_megatron.recipe import load_recipe
    from run_scripts.bench.long_answers import BASE

    settings = [f"model.path={options.model}", f"learner.threads={options.threads}", *options.set]
    learner = build_learner(load_recipe(BASE, settings))
    samples, advantages = make_update(options.sizes[0])

    def step() -> tuple[float, float]:
        found = update(learner, samples, advantages)
        return found["loss"], found["grad_norm"]

    return step, sum(sample.tokens for sample in samples)


def bare(rows: int, options: argparse.Namespace) -> tuple[Callable[[], tuple[float, float]], int]:
    """The same with transformers and torch alone, `rows` responses in a micro-batch."""
    from transformers import Qwen2ForCausalLM

    torch.set_num_threads(options.threads)
    model = Qwen2ForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    samples, advantages = make_update(options.sizes[0])
    trained = sum(len(sample.response_ids) for sample in samples)

    def part_loss(chosen: list[int]) -> torch.Tensor:
        picked = [samples[i] for i in chosen]
        ids = np.zeros((len(picked), max(sample.tokens for sample in picked)), dtype=np.int64)
        answers = np.zeros_like(ids, dtype=bool)
        for row, sample in enumerate(picked):
            ids[row, : sample.tokens] = np.concatenate([sample.prompt_ids, sample.response_ids])
            answers[row, len(sample.prompt_ids) : sample.tokens] = True
        tokens, where = torch.from_numpy(ids), torch.from_numpy(answers)
        hidden = model.model(tokens, use_cache=False).last_hidden_state  # padding on the right: causality hides it
        logits = model.lm_head(hidden[:, :-1][where[:, 1:]])
        logprobs = logits.log_softmax(-1).gather(1, tokens[where][:, None])[:, 0]
        behaviour = torch.from_numpy(np.concatenate([sample.engine_logprobs for sample in picked]))
        gains = torch.from_numpy(np.repeat(advantages[chosen], [len(sample.response_ids) for sample in picked]))
        ratio = (logprobs - behaviour).exp()
        return -torch.minimum(ratio * gains, ratio.clamp(*CLIP) * gains).sum() / trained

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        order = sorted(range(len(samples)), key=lambda i: -samples[i].tokens)
        total = 0.0
        for start in range(0, len(order), rows):
            loss = part_loss(order[start : start + rows])
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        return total, norm

    return step, sum(sample.tokens for sample in samples)


def _measure(options: argparse.Namespace) -> dict[str, float]:
    """The first update's loss and gradient norm, and the median seconds of the later ones."""
    step, tokens = ours(options) if options.one == "ours" else bare(int(options.one), options)
    loss, norm = step()
    step()
    seconds = []
    for _ in range(options.repeats):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return {"seconds": statistics.median(seconds), "loss": loss, "norm": norm, "tokens": tokens}


def _alone(options: argparse.Namespace, size: str, folder: str, name: str) -> dict[str, Any]:
    words = ["--one", name, "--sizes", size, "--model", folder, "--threads", str(options.threads)]
    words += ["--repeats", str(options.repeats), *[word for one in options.set for word in ("--set", one)]]
    command = [sys.executable, "-m", "run_scripts.bench.learner_step", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _save(folder: Path, size: str) -> None:
    from run_scripts.bench import long_answers

    long_answers._save(folder, SHAPES[size][0])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.8M", "10M"], choices=list(SHAPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128], help="of a micro-batch of the bare step")
    parser.add_argument("--set", action="append", default=[], help="SECTION.KEY=VALUE of our recipe")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
