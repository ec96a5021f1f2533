"""Compares weight sync and conversion with a plain memory copy of the same bytes.

    python -m run_scripts.bench.weight_sync [--megabytes 200] [--dtype float32] [--repeats 7] [--bucket-megabytes 512]
    python -m run_scripts.bench.weight_sync --convert --megabytes 1000      # both conversions instead, with memory

`compare_weights` is what `engine.check_weights` does: it compares checksums of every tensor.

The model is a random Qwen2 of about the given size; learner and engine run on CUDA if there is a device, else on CPU.
The copy is `Tensor.copy_` between two existing buffers of the device, with as many threads as the learner uses.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mugrpo_megatron.recipe import Recipe
from tests.models import Storage, save_model

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 1024, 2816, 16, 4, 32000
ROOT = Path(__file__).parents[2]
ITEM = {"float32": 4, "bfloat16": 2}


def make_model(directory: Path, megabytes: int, dtype: str) -> int:
    """Write a random checkpoint of about that size; returns its size in bytes."""
    head_dim = HIDDEN // HEADS
    embedding = VOCAB * HIDDEN
    layer = HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * head_dim + 3 * FFN)
    layers = max(2, round((megabytes * 1e6 / ITEM[dtype] - embedding) / layer))
    model = save_model(
        directory,
        "qwen2",
        Storage(getattr(torch, dtype), shard_size="300MB"),
        scale=None,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return sum(p.numel() * p.element_size() for p in model.parameters())


def timed(actions: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each action; the actions take turns, and the first round does not count."""
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

    hf = options.hf or directory / "hf"
    if not options.hf:
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
        weight_sync = build_weight_sync(
            learner.models,
            learner.architecture,
            options.bucket_megabytes * 10**6,
            recipe.engine.tensor,
        )
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


def file_copy(directory: Path) -> list[float]:
    """Seconds to copy the checkpoint's files and fsync them, as every conversion does."""
    start = time.perf_counter()
    shutil.copytree(directory / "hf", directory / "copy")
    for path in (directory / "copy").iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    found = [time.perf_counter() - start]
    shutil.rmtree(directory / "copy")
    return found


def bench_conversion(options: argparse.Namespace, directory: Path) -> None:
    """Measure each conversion in its own process, for its own peak memory."""
    size = make_model(directory / "hf", options.megabytes, options.dtype)
    (copied,) = timed([plain_copy(size)], options.repeats)
    rows = [("plain copy", copied), ("file copy", file_copy(directory))]
    hf, megatron, back = (f"{directory}/{name}" for name in ("hf", "megatron", "back"))
    steps = (
        ("hf_to_megatron", ["--hf", hf, "--out", megatron]),
        ("megatron_to_hf", ["--megatron", megatron, "--out", back, "--like", hf]),
        ("verify", ["--hf", hf, "--megatron", megatron, "--no-logits"]),
    )
    memory: dict[str, int] = {}
    for name, arguments in steps:
        start = time.perf_counter()
        code = (
            f"import sys; from pathlib import Path; from checkpoints_convert.{name} import main; "
            "done = main(sys.argv[1:]); print(Path('/proc/self/status').read_text()); sys.exit(done)"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, check=True, capture_output=True, text=True
        )
        rows.append((name, [time.perf_counter() - start]))
        memory[name] = int(result.stdout.split("VmHWM:")[1].split()[0]) * 1024
    report(f"{size / 1e6:.0f} MB of {options.dtype}, command start included", size, rows, memory)


def report(
    title: str, size: int, rows: Iterable[tuple[str, list[float]]], memory: dict[str, int] | None = None
) -> None:
    """Print a table: median and best seconds, rate, and time in plain copies."""
    table = Table(title=title, title_justify="left")
    for column in ("", "median s", "best s", "GB/s", "copies", *(["peak MB"] if memory else [])):
        table.add_column(column, justify="right" if column else "left")
    unit = 0.0
    for name, seconds in rows:
        median = statistics.median(seconds)
        unit = unit or median
        cells = [name, f"{median:.3f}", f"{min(seconds):.3f}", f"{size / median / 1e9:.2f}", f"{median / unit:.2f}"]
        if memory:
            cells.append(f"{memory[name] / 1e6:.0f}" if name in memory else "")
        table.add_row(*cells)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--hf", type=Path, metavar="DIR", help="sync this checkpoint instead of a random one")
    parser.add_argument("--dtype", choices=ITEM, default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bucket-megabytes", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the learner and of the plain copy")
    parser.add_argument("--convert", action="store_true", help="conversion instead of sync")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        (bench_conversion if options.convert else bench_sync)(options, Path(directory))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory of this process {own / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
