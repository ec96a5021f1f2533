"""Compares weight sync with a plain memory copy of the same bytes.

    python -m run_scripts.dev.bench.weight_sync [--megabytes 200] [--dtype float32] [--repeats 7]
        [--bucket-megabytes 512]

`compare_weights` is what `engine.check_weights` does: it compares checksums of every tensor.

The model is a random Qwen2 of about the given size; learner and engine run on CUDA if there is a device, else on CPU.
The copy is `Tensor.copy_` between two existing buffers of the device, with as many threads as the learner uses.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from mugrpo_megatron.recipe import Recipe
from tests.models import Storage, save_model

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 1024, 2816, 16, 4, 32000
ITEM = {"float32": 4, "bfloat16": 2}


def make_model(directory: Path, megabytes: int, dtype: str) -> None:
    """Write a random checkpoint of about this many megabytes."""
    layer = HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * HIDDEN // HEADS + 3 * FFN)
    save_model(
        directory,
        "qwen2",
        Storage(getattr(torch, dtype), shard_size="300MB"),
        scale=None,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=max(2, round((megabytes * 1e6 / ITEM[dtype] - VOCAB * HIDDEN) / layer)),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )


def timed(actions: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Returns the seconds of each action. The actions take turns, and the first round is not counted."""
    found: list[list[float]] = [[] for _ in actions]
    for round_ in range(repeats + 1):
        for seconds, action in zip(found, actions, strict=True):
            start = time.perf_counter()
            action()
            if round_ > 0:
                seconds.append(time.perf_counter() - start)
    return found


def plain_copy(size: int) -> Callable[[], object]:
    """A function that copies `size` bytes from one buffer to another on the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    return copy


def bench_sync(options: argparse.Namespace, directory: Path) -> None:
    from mugrpo_megatron.engine.client import Engine
    from mugrpo_megatron.learner.groups import shutdown
    from mugrpo_megatron.learner.learner import build_learner
    from mugrpo_megatron.run.engine_spec import engine_spec
    from mugrpo_megatron.weights.check import compare_weights
    from mugrpo_megatron.weights.sync import build_weight_sync, sync

    hf = directory / "hf"
    make_model(hf, options.megabytes, options.dtype)
    recipe = Recipe.model_validate(
        {
            "model": {"path": hf, "dtype": options.dtype},
            "engine": {"max_running_requests": 4, "extra": {"max_total_tokens": 2048}},
            "learner": {"threads": options.threads},
            "data": {"max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 128},
        }
    )
    engine = Engine.start(engine_spec(recipe), hf, directory / "engine.log")
    with ExitStack() as stack:
        stack.callback(engine.stop)
        learner = build_learner(recipe)
        start = time.perf_counter()
        bucket_bytes = options.bucket_megabytes * 10**6
        weight_sync = build_weight_sync(learner.models, learner.architecture, bucket_bytes, recipe.engine.tensor)
        planning = time.perf_counter() - start
        engine.wait_ready()
        plan = weight_sync.plan
        compared, size = compare_weights(weight_sync, engine), plan.bytes
        actions = [
            plain_copy(size),
            lambda: sync(weight_sync, engine, version=0),
            lambda: compare_weights(weight_sync, engine),
        ]
        copies, syncs, checks = timed(actions, options.repeats)
    shutdown()
    report(
        f"{size / 1e6:.0f} MB of {options.dtype}, {len(plan.buckets)} buckets of at most "
        f"{plan.largest / 1e6:.0f} MB, {compared} tensors equal in the engine, plan {planning * 1e3:.0f} ms",
        size,
        [("plain copy", copies), ("sync", syncs), ("check", checks)],
    )


def report(title: str, size: int, rows: Sequence[tuple[str, list[float]]]) -> None:
    """Print for each row median and best seconds, the rate, and the time as a multiple of the first row's (the plain
    copy)."""
    print(title)
    unit = statistics.median(rows[0][1])
    for name, seconds in rows:
        median = statistics.median(seconds)
        rate = f"{size / median / 1e9:.2f} GB/s, {median / unit:.2f} copies"
        print(f"{name:12}{median:.3f} s, best {min(seconds):.3f} s, {rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--dtype", choices=ITEM, default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bucket-megabytes", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the learner and of the plain copy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        bench_sync(options, Path(directory))


if __name__ == "__main__":
    main()
