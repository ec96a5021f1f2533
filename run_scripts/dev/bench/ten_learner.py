"""The steps of run_scripts/dev/bench/ten.py that measure the learner; none needs SGLang.

Every step takes `small`, which makes its shapes tiny for a first try or a CPU, and yields rows of JSON values.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

Row = dict[str, Any]


class ModelShape(NamedTuple):
    """Sizes of a random Qwen2, as in its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool = True


SHAPES = {
    "Qwen2.5-1.5B": ModelShape(1536, 8960, 28, 12, 2, 151936),
    "Qwen2.5-7B, 2 layers": ModelShape(3584, 18944, 2, 28, 4, 152064, tie_word_embeddings=False),
    "Qwen2.5-7B, 6 layers": ModelShape(3584, 18944, 6, 28, 4, 152064, tie_word_embeddings=False),
    "small": ModelShape(64, 128, 2, 4, 2, 512),
    "small, 3 layers": ModelShape(64, 128, 3, 4, 2, 512, tie_word_embeddings=False),
}
SAMPLES, RESPONSES = 64, 8
"""Responses of an update, and responses to a prompt. An update is four micro-batches, so that the optimizer's step
weighs as in a run."""
CYCLES = 6


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def attention() -> dict[str, str]:
    """Keys of `[engine.extra]` for what is installed: carry.sh leaves out FlashAttention 3, SGLang's default."""
    kernels = find_spec("sgl_kernel") if torch.cuda.is_available() else None
    if kernels is None or kernels.origin is None or list(Path(kernels.origin).parent.glob("flash_ops*")):
        return {}
    return {"attention_backend": "triton"}


def bucket_sizes(small: bool) -> tuple[int, int]:
    """The two bucket sizes of a weight sync in `recipe.systems`, for a CPU and for CUDA; smaller ones with `small`."""
    return (1 << 16, 1 << 19) if small else (512 << 20, 4 << 30)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one run."""
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of `repeats` runs after a warm-up run."""
    return statistics.median([seconds_of(work) for _ in range(repeats + 1)][1:])


def peak_bytes() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def reset_peak() -> int:
    """Free unused memory and start a new measurement of the peak; returns the bytes that are in use."""
    gc.collect()  # a learner is a cycle of references
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def free_bytes() -> int | None:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def ceilings(small: bool) -> Iterator[Row]:
    """Measure FLOP/s of large products, and bytes/s of copies on the device and to and from pinned memory."""
    for n in (128, 256) if small else (8192, 16384):
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device()) for _ in range(2))
        yield {"product": n, "flops_per_s": 2 * n**3 / seconds(lambda a=a, b=b: a @ b)}  # type: ignore[misc]
    size = 1 << 22 if small else 4 << 30
    source = torch.ones(size, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    yield {"copy_bytes_per_s": 2 * size / seconds(lambda: target.copy_(source))}
    started = time.perf_counter()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    yield {"pin_s": time.perf_counter() - started, "bytes": size}
    yield {"to_device_bytes_per_s": size / seconds(lambda: target.copy_(host, non_blocking=True))}
    yield {"to_host_bytes_per_s": size / seconds(lambda: host.copy_(source, non_blocking=True))}


def loss(small: bool) -> Iterator[Row]:
    """Time the loss at Qwen2.5-7B's output layer against its three GEMMs; gradients go into main_grad as in a
    learner."""
    from run_scripts.dev.bench import loss_ways

    shape = loss_ways.Shape(16384, 3584, 152064, 1024, "bfloat16", "cuda", 4096)
    if small:
        shape = loss_ways.Shape(256, 32, 512, 64, "float32", device().type, 64)
    inputs = loss_ways.make_inputs(shape)
    main_grad = torch.zeros(shape.vocab, shape.hidden, device=shape.device)
    fused = partial(loss_ways.fused, main_grad=main_grad)
    without_veto = partial(fused, config=loss_ways.PLAIN)
    ways: list[tuple[str, float, Callable[..., torch.Tensor]]] = [
        ("floor", 1, loss_ways.floor),
        *(("fused", factor, fused) for factor in (1, 0.5, 2)),
        ("fused without veto", 1, without_veto),
        ("logprobs only", 1, loss_ways.logprobs_only),
    ]
    floor_s = None
    for name, factor, way in ways:
        chunked = replace(inputs, shape=replace(shape, chunk=int(factor * shape.chunk)))

        def step(way: Callable[..., torch.Tensor] = way, chunked: loss_ways.Inputs = chunked) -> None:
            chunked.hidden.grad = None
            value = way(chunked)
            if value.requires_grad:
                value.backward()

        held, taken = reset_peak(), seconds(step)
        floor_s = floor_s or taken
        row = {"way": name, "chunk": chunked.shape.chunk, "median_s": taken, "times_floor": taken / floor_s}
        yield {**row, "peak_bytes": (peak_bytes() or held) - held}


def save_random(name: str, directory: Path) -> Path:
    """A random checkpoint of one of SHAPES, in bfloat16."""
    from tests.models import Storage, save_model

    storage = Storage(torch.bfloat16, device().type)
    sizes = {**SHAPES[name]._asdict(), "max_position_embeddings": 32768, "eos_token_id": None}
    save_model(directory, "qwen2", storage, scale=None, **sizes)
    return directory


def recipe_of(model: Path, small: bool, length: int | None = None) -> Any:
    """A recipe with samples of 1,024 tokens (64 with `small`), or of `length`, and micro-batches of 16 x 1,024 (16 x
    64) tokens."""
    from mugrpo_megatron.recipe import Recipe

    usual = 64 if small else 1024
    length = length or usual
    table: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": length // 8},
        "rollout": {
            "prompts_per_update": SAMPLES // RESPONSES,
            "responses_per_prompt": RESPONSES,
            "max_response_tokens": length - length // 8,
        },
        "learner": {"micro_batch_tokens": 16 * usual},
        "engine": {"memory_fraction": 0.6, "max_running_requests": 256, "extra": attention()},
    }
    return Recipe.model_validate(table)


def sample_update(recipe: Any, vocabulary: int) -> tuple[list[Any], np.ndarray]:
    """Make an update of responses of full length, so that packed rows need no padding."""
    from mugrpo_megatron.samples import Sample

    rng = np.random.default_rng(0)
    prompt, response = recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens
    samples = []
    for index, logprobs in enumerate(rng.normal(-11, 0.3, (SAMPLES, response)).astype(np.float32)):
        group, reward = index // RESPONSES, float(index % 2)
        ids = [rng.integers(0, vocabulary, length).astype(np.int32) for length in (prompt, response)]
        sample = Sample(group, str(group), ids[0], ids[1], logprobs, reward, 0, "length", behaviour_logprobs=logprobs)
        samples.append(sample)
    return samples, rng.normal(size=SAMPLES).astype(np.float32)


@contextmanager
def learner_of(name: str, small: bool, layers: str = "local") -> Iterator[tuple[Any, Callable[[], object]]]:
    """Build a learner of one of SHAPES with `learner.layers`; yields it, and a function that takes an update."""
    from mugrpo_megatron.learner.groups import shutdown
    from mugrpo_megatron.learner.learner import build_learner
    from mugrpo_megatron.learner.update import update

    reset_peak()
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(save_random(name, Path(folder)), small)
        recipe = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"layers": layers})})
        mine = build_learner(recipe)
    reset_peak()  # the checkpoint's model is freed, so the peak is that of updates
    samples, advantages = sample_update(recipe, SHAPES[name].vocab_size)
    yield mine, lambda: update(mine, samples, advantages)
    shutdown()


def flops_of(mine: Any) -> float:
    """FLOP of an update."""
    from mugrpo_megatron.extras.plan.time import token_flops

    length, response = 8 * mine.recipe.data.max_prompt_tokens, mine.recipe.rollout.max_response_tokens
    work = token_flops(mine.architecture, length)
    return 3 * SAMPLES * (length * (work.layers + work.attention) + response * work.head)


def mfu(flops: float, taken: float) -> float | None:
    """The share of the data sheet's FLOP/s, as a run logs it."""
    from mugrpo_megatron.observe.environment import peak_flops

    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return flops / taken / peak if peak else None


def update_row(mine: Any, taken: float) -> Row:
    """The row of an update: its rates, and its peak memory beside the planned one."""
    from mugrpo_megatron.extras.plan.case import make_case
    from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
    from mugrpo_megatron.extras.plan.memory import PackedRows, learner_memory

    tokens, flops = SAMPLES * 8 * mine.recipe.data.max_prompt_tokens, flops_of(mine)
    case = make_case(mine.recipe, mine.architecture, {}, make_cluster(1, 1, "h200"), Assumptions())
    return {
        "update_s": taken,
        "tokens_per_s": tokens / taken,
        "flops_per_s": flops / taken,
        "mfu": mfu(flops, taken),
        "peak_bytes": peak_bytes(),
        "planned_bytes": learner_memory(case, PackedRows(tokens // 4, 4), pp_stage=0).total,
    }


def learner(small: bool) -> Iterator[Row]:
    """Measure updates at 1.5B, then cycles of sleep, sync into another process, and waking; memory must not grow."""
    from mugrpo_megatron.weights.sync import build_weight_sync, fill_for_engines, sync

    name = "small" if small else "Qwen2.5-1.5B"
    with learner_of(name, small) as (mine, update), reader_process() as reader:
        yield {"first_update_s": seconds_of(update)}
        yield {"model": name, **update_row(mine, seconds(update, repeats=2))}
        syncs = {size: build_weight_sync(mine.models, mine.architecture, size, 1) for size in bucket_sizes(small)}
        for cycle in range(CYCLES):
            bucket_bytes = bucket_sizes(small)[cycle >= CYCLES // 2]
            weight_sync = syncs[bucket_bytes]
            buckets = len(weight_sync.plan.buckets)
            steps: dict[str, Callable[[], object]] = {
                "optimizer_sleeps_s": lambda: mine.offload("optimizer"),
                "fill_s": lambda: [fill_for_engines(weight_sync, number) for number in range(buckets)],  # noqa: B023
                "sync_s": lambda: sync(weight_sync, reader, version=1),  # noqa: B023
                "weights_sleep_s": lambda: mine.offload("weights"),
            }
            row: Row = {step: seconds_of(work) for step, work in steps.items()}
            row |= {"free_asleep_bytes": free_bytes(), "learner_wakes_s": seconds_of(mine.reload)}
            row |= {"update_s": seconds_of(update), "peak_bytes": peak_bytes()}
            yield {
                "cycle": cycle,
                "bucket_bytes": bucket_bytes,
                "buckets": buckets,
                "bytes": weight_sync.bytes,
                "fill_bytes_per_s": weight_sync.bytes / row["fill_s"],
                **row,
            }


class Reader:
    """Stands in for an engine: another process that copies every bucket (`weights.sync.WeightReceiver`)."""

    readers = 1

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def load_bucket(self, serialized: list[bytes]) -> None:
        self._connection.send(serialized[0])
        assert self._connection.recv()

    def set_version(self, version: int) -> None:
        """Do nothing: this reader generates nothing."""


def read_buckets(connection: Any) -> None:
    """Copy each bucket that arrives, and answer with its number of bytes."""
    connection.send("ready")
    while True:
        try:
            bucket = pickle.loads(connection.recv())
        except EOFError:
            return
        tensors = [bucket["flattened_tensor"]] if isinstance(bucket, dict) else [tensor for _, tensor in bucket]
        size = sum(tensor.clone().nbytes for tensor in tensors)
        wait()
        del bucket, tensors
        connection.send(size)


@contextmanager
def reader_process() -> Iterator[Reader]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=read_buckets, args=(there,), daemon=True)
    process.start()
    try:
        assert here.recv() == "ready"
        yield Reader(here)
    finally:
        process.kill()
        process.join()


def layers(small: bool) -> Iterator[Row]:
    """Measure updates of a 7B model with two and with six layers; from the difference follows an update with 28."""
    names = ("small", "small, 3 layers") if small else ("Qwen2.5-7B, 2 layers", "Qwen2.5-7B, 6 layers")
    points = []
    for name in names:
        with learner_of(name, small) as (mine, update):
            row = update_row(mine, seconds(update, repeats=2))
            yield {"model": name, **row}
            points.append((SHAPES[name].num_hidden_layers, row["update_s"], flops_of(mine)))
            del mine, update
    (few, few_s, few_flops), (many, many_s, many_flops) = points
    layer_s, layer_flops = (many_s - few_s) / (many - few), (many_flops - few_flops) / (many - few)
    taken, flops = few_s + (28 - few) * layer_s, few_flops + (28 - few) * layer_flops
    yield {"layer_of_65536_tokens_s": layer_s, "update_of_28_layers_s": taken, "mfu_of_28_layers": mfu(flops, taken)}


def profile_update(small: bool) -> Iterator[Row]:
    """Measure the longest kernels of one update."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with learner_of("small" if small else "Qwen2.5-7B, 2 layers", small) as (_, update):
        update()  # compiles
        wait()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
            update()
            wait()
    attribute = "self_device_time_total" if cuda else "self_cpu_time_total"
    averages = profiler.key_averages()
    entries = sorted(averages, key=lambda entry: -getattr(entry, attribute))[:25]
    yield {"kernels_ms": {entry.key[:80]: [getattr(entry, attribute) / 1e3, entry.count] for entry in entries}}


def row_kernels(small: bool) -> Iterator[Row]:
    """Measure with ncu which share of the device memory's bandwidth the loss's row kernels reach."""
    # Three launches: statistics for the inputs' log-probabilities, then statistics and gradient of the loss.
    options = "--target-processes all --clock-control none -k regex:_statistics|_gradient -c 3"
    bench = f"{sys.executable} -m run_scripts.dev.bench.loss_path --device cuda --tokens 4096 --ways fused --repeats 1"
    done = subprocess.run(f"ncu {options} {bench}".split(), capture_output=True, text=True)
    print(done.stdout, done.stderr)
    words = "_statistics (", "_gradient (", "Throughput", "Duration"
    lines = [line.strip() for line in done.stdout.splitlines() if any(word in line for word in words)]
    yield {"ncu": lines, "code": done.returncode}
