"""The steps of run_scripts/dev/bench/ten.py that measure the engine; they need SGLang."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from run_scripts.dev.bench.ten_learner import (
    RESPONSES,
    SHAPES,
    Row,
    bucket_sizes,
    free_bytes,
    recipe_of,
    sample_update,
    save_random,
    seconds,
    seconds_of,
)

ROUNDS = (0, 0, 0, 1, 1)
"""The bucket size of each round, as an index into `bucket_sizes`."""


def prompt_ids(count: int) -> list[list[int]]:
    return [[3 + (index * step) % 500 for step in (1, 7, 31, 57, 111)] for index in range(count)]


@contextmanager
def engine_of(folder: Path, small: bool, length: int | None = None, **sizes: Any) -> Iterator[tuple[Any, Any]]:
    """Start the project's engine on a random model; yields its recipe (`recipe_of`, with these `sizes` of the engine)
    and the engine."""
    from mugrpo_megatron.engine.client import Engine
    from mugrpo_megatron.run.engine_spec import engine_spec

    model = save_random("small" if small else "Qwen2.5-1.5B", folder / "model")
    recipe = recipe_of(model, small, length)
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update=sizes)})
    # Not in `folder`, which ends with this step's failure: `keep_logs` looks in TMPDIR.
    engine = Engine.start(engine_spec(recipe), model, Path(tempfile.gettempdir()) / "engine.log")
    try:
        yield recipe, engine
    finally:
        engine.stop()


def generation(engine: Any, small: bool, count: int, tokens: int | None = None) -> tuple[Callable[[], list[Any]], int]:
    """A function that samples `count` x 8 responses, and the number of all their tokens.

    A response has `tokens` tokens, by default 512 (16 with `small`).
    """
    from mugrpo_megatron.engine.wire import Sampling
    from mugrpo_megatron.samples import Problem, Prompt

    prompts = [Prompt(i, Problem(str(i), "", ""), ids) for i, ids in enumerate(prompt_ids(count))]
    limit = tokens or (16 if small else 512)
    sampling = Sampling(1.0, 1.0, limit, ())
    return lambda: list(engine.generate(prompts, RESPONSES, sampling)), count * RESPONSES * limit


def switch(small: bool) -> Iterator[Row]:
    """Measure the switch from learner to engine and back, as in phases/generate.py, with buckets of two sizes."""
    from mugrpo_megatron.learner.learner import build_learner
    from mugrpo_megatron.learner.update import update
    from mugrpo_megatron.weights.sync import build_weight_sync, sync

    with tempfile.TemporaryDirectory() as folder, engine_of(Path(folder), small) as (recipe, engine):
        yield {"start_s": seconds_of(engine.wait_ready), "free_awake_bytes": free_bytes()}
        yield {"first_sleep_s": seconds_of(engine.sleep), "free_asleep_bytes": free_bytes()}
        mine = build_learner(recipe)
        samples, advantages = sample_update(recipe, SHAPES["small" if small else "Qwen2.5-1.5B"].vocab_size)
        syncs = {size: build_weight_sync(mine.models, mine.architecture, size, 1) for size in bucket_sizes(small)}
        generate, tokens = generation(engine, small, 4 if small else 32)
        for number, size in enumerate(ROUNDS):
            bucket_bytes = bucket_sizes(small)[size]
            weight_sync = syncs[bucket_bytes]
            groups: list[Any] = []
            steps: dict[str, Callable[[], object]] = {
                "update": lambda: update(mine, samples, advantages),
                "optimizer_sleeps": lambda: mine.offload("optimizer"),
                "engine_weights_wake": lambda: engine.wake("weights"),
                "sync": lambda: sync(weight_sync, engine, version=1),  # noqa: B023
                "learner_weights_sleep": lambda: mine.offload("weights"),
                "engine_cache_wakes": lambda: engine.wake("kv_cache"),
                "generate": lambda: groups.extend(generate()),  # noqa: B023
                "engine_sleeps": engine.sleep,
            }
            row: Row = {f"{step}_s": seconds_of(work) for step, work in steps.items()}
            row |= {"free_asleep_bytes": free_bytes(), "learner_wakes_s": seconds_of(mine.reload)}
            yield {
                "round": number,
                "bucket_bytes": bucket_bytes,
                "buckets": len(weight_sync.plan.buckets),
                "bridge_bytes_per_s": weight_sync.bytes / row["sync_s"],
                "tokens_per_s": tokens / row["generate_s"],
                "mismatch_nats": mismatch(mine, groups),
                **row,
            }


def mismatch(mine: Any, groups: list[Any]) -> float:
    """The mean difference of engine's and learner's log-probabilities in nats, over 16 responses."""
    from mugrpo_megatron.learner.update import token_logprobs
    from mugrpo_megatron.samples import Sample

    responses = [(prompt, response) for prompt, group in groups for response in group][:16]
    samples = [
        Sample(prompt.index, "", np.array(prompt.ids, np.int32), got.ids, got.logprobs, 0.0, 1, got.finish_reason)
        for prompt, got in responses
    ]
    distance = np.concatenate(token_logprobs(mine, samples)) - np.concatenate([got.logprobs for _, got in responses])
    return float(np.abs(distance).mean())


SYNCS = 30
SMALL_ENGINE: Mapping[str, Any] = {"memory_fraction": 0.3, "max_running_requests": 16}


def drift(small: bool) -> Iterator[Row]:
    """Measure mean |engine - learner| in nats after each of 30 syncs, with an update before each, to see if it
    grows.

    The engine is small enough for the learner to stay awake beside it: offloading it 30 times takes half a minute.
    """
    from mugrpo_megatron.learner.learner import build_learner
    from mugrpo_megatron.learner.update import update
    from mugrpo_megatron.weights.sync import build_weight_sync, sync

    with tempfile.TemporaryDirectory() as folder, engine_of(Path(folder), small, **SMALL_ENGINE) as (recipe, engine):
        engine.wait_ready()
        engine.sleep()
        mine = build_learner(recipe)
        samples, advantages = sample_update(recipe, SHAPES["small" if small else "Qwen2.5-1.5B"].vocab_size)
        samples, advantages = samples[: 2 * RESPONSES], advantages[: 2 * RESPONSES]
        weight_sync = build_weight_sync(mine.models, mine.architecture, bucket_sizes(small)[1], 1)
        generate, _ = generation(engine, small, 2, tokens=16 if small else 128)
        found: list[float] = []
        for round_ in range(4 if small else SYNCS):
            update(mine, samples, advantages)
            engine.wake("weights")
            sync(weight_sync, engine, version=round_)
            engine.wake("kv_cache")
            groups = generate()
            engine.sleep()
            found.append(mismatch(mine, groups))
            yield {"sync": round_, "mismatch_nats": found[-1]}
        half = len(found) // 2
        early, late = (float(np.mean(part)) for part in (found[:half], found[half:]))
        yield {"first_half_nats": early, "second_half_nats": late, "growth": late / early}


def switch_without_graphs(small: bool) -> Iterator[Row]:
    """Run `switch` with an engine whose CUDA graphs are released too; of use only if the memory saver's probe
    passes."""
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    yield from switch(small)


def engine_ours(small: bool) -> Iterator[Row]:
    """Measure tokens a second of the project's engine process."""
    with tempfile.TemporaryDirectory() as folder, engine_of(Path(folder), small) as (_, engine):
        generate, tokens = generation(engine, small, 4 if small else 64)
        yield {"tokens_per_s": tokens / seconds(generate, repeats=1)}


NEIGHBOURS, TURNS = 4, 20


def asleep(small: bool) -> Iterator[Row]:
    """Count failures of engines that fall asleep while others compute on the same GPU; also seconds of a turn and of a
    start.

    With `backup`, SGLang keeps a copy of the weights in host memory, and waits for the device when it makes it. If
    fewer engines fail then, failures come from unmapping weights that a kernel still reads. `engine.between_stages =
    "restart"` avoids them in any case, at the cost of `start_s` a turn.
    """
    for way, extra in {"sleep": {}, "backup": {"enable_weights_cpu_backup": True}}.items():
        yield {"way": way, **neighbours(extra, small)}


def neighbours(extra: dict[str, Any], small: bool) -> Row:
    """Run NEIGHBOURS engines (2 with `small`), each in a thread: TURNS times (2 with `small`) sample, fall asleep,
    wake."""
    from mugrpo_megatron.engine.client import Engine
    from mugrpo_megatron.errors import EngineFailure
    from mugrpo_megatron.run.engine_spec import engine_spec

    turns = 2 if small else TURNS

    def run(engine: Any) -> list[str]:
        failures = []
        for _ in range(turns):
            try:
                engine.wait_ready()
                generation(engine, small, 4, tokens=16 if small else 64)[0]()
                engine.sleep()
                engine.wake("weights")
                engine.wake("kv_cache")
            except EngineFailure as failure:
                failures.append(str(failure).splitlines()[0][:160])
                engine.restart()
        return failures

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = save_random("small" if small else "Qwen2.5-1.5B", Path(folder) / "model")
        recipe = recipe_of(model, small)
        # Engines that start together cannot each measure what is free.
        sizes = {"extra": recipe.engine.extra | {"max_total_tokens": 1 << 13 if small else 1 << 16} | extra}
        section = recipe.engine.model_copy(update=sizes | {"memory_fraction": 0.15, "max_running_requests": 64})
        spec = engine_spec(recipe.model_copy(update={"engine": section}))
        started = time.perf_counter()
        logs = Path(tempfile.gettempdir())
        engines = [
            Engine.start(spec, model, logs / f"engine-{number}.log") for number in range(2 if small else NEIGHBOURS)
        ]
        for engine in engines:
            stack.callback(engine.stop)
        for engine in engines:
            engine.wait_ready()
        ready = time.perf_counter()
        pool = stack.enter_context(ThreadPoolExecutor(len(engines)))  # an engine ends with the thread that restarts it
        failures = [reason for reasons in pool.map(run, engines) for reason in reasons]
        taken = time.perf_counter() - ready
    row = {"start_s": ready - started, "turn_s": taken / turns, "turns": turns * len(engines)}
    return {**row, "failures": len(failures), "reasons": failures[:3]}


def engine_bare(small: bool) -> Iterator[Row]:
    """Measure tokens a second of SGLang's own `generate`, with the same prompts in one call."""
    from mugrpo_megatron.cuda import finds_cuda
    from mugrpo_megatron.engine.launch import engine_arguments, engine_environment
    from mugrpo_megatron.run.engine_spec import engine_spec

    with tempfile.TemporaryDirectory() as folder:
        model = save_random("small" if small else "Qwen2.5-1.5B", Path(folder) / "model")
        recipe, cuda = recipe_of(model, small), finds_cuda()
        os.environ.update(engine_environment(recipe.engine, model, cuda))
        import sglang  # reads the environment at import

        bare = sglang.Engine(**engine_arguments(engine_spec(recipe), model, cuda))
        limit = 16 if small else 512
        settings = {"temperature": 1.0, "max_new_tokens": limit}
        inputs = [ids for ids in prompt_ids(4 if small else 64) for _ in range(RESPONSES)]
        taken = seconds(
            lambda: bare.generate(input_ids=inputs, sampling_params=settings, return_logprob=True), repeats=1
        )
        bare.shutdown()
    yield {"tokens_per_s": len(inputs) * limit / taken}
