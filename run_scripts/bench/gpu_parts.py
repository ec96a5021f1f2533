"""Parts of run_scripts/bench/gpu.py: each measures one thing, in its own process.

Every part takes whether its shapes are tiny, for a first try or a CPU, and returns figures as JSON values.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936),
    "small": (64, 128, 2, 4, 2, 512),
}
"""Name -> hidden, feed-forward, layers, heads, key/value heads, vocabulary; embeddings tied."""
RESPONSES = 8
"""Responses to each prompt in the engines' parts."""
Result = dict[str, Any]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def attention() -> dict[str, str]:
    """`[engine.extra]` for what is installed: carry.sh leaves FlashAttention 3, SGLang's choice, behind."""
    kernels = find_spec("sgl_kernel")
    if kernels is None or kernels.origin is None or list(Path(kernels.origin).parent.glob("flash_ops*")):
        return {}
    return {"attention_backend": "triton"}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """Median seconds of `repeats` runs after a warm-up run."""
    found = []
    for _ in range(repeats + 1):
        wait()
        started = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def ceilings(small: bool) -> Result:
    """Bytes/s read and written by a device copy, FLOP/s of a large product."""
    size, n = (1 << 22, 256) if small else (4 << 30, 16384)
    source = torch.ones(size, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device()) for _ in range(2))
    return {
        "copy_bytes_per_s": 2 * size / seconds(lambda: target.copy_(source)),
        "matmul_flops": 2 * n**3 / seconds(lambda: a @ b),
    }


def loss(small: bool) -> Result:
    """Seconds and peak MiB of every installed implementation of the loss, at Qwen2.5-7B's output layer."""
    from run_scripts.bench import loss_path, loss_ways

    shape = loss_ways.Shape(16384, 3584, 152064, 1024, "bfloat16", "cuda", 4096)
    if small:
        shape = loss_ways.Shape(256, 32, 512, 64, "float32", device().type, 64)
    ways = ["floor", "fused", "fused_without_veto", "fused_two_passes", "logprobs_only", "liger", "trl_fused_head"]
    found: Result = {"shape": asdict(shape)}
    for way in ways:
        if not find_spec(package := loss_ways.NEEDS.get(way, "torch")):
            found[way] = {"failed": f"{package} is not installed"}
            continue
        one = loss_path.run_alone(way, shape, repeats=3, threads=torch.get_num_threads())
        found[way] = {"failed": one} if isinstance(one, str) else asdict(one)
        if not isinstance(one, str):
            found[way]["median_s"] = statistics.median(one.seconds)
    return found


def save_random(name: str, directory: Path) -> Path:
    """A random checkpoint of one of SHAPES, in bfloat16."""
    from tests.models import Storage, save_model

    hidden, feed_forward, layers, heads, kv_heads, vocab = SHAPES[name]
    save_model(
        directory,
        "qwen2",
        Storage(torch.bfloat16, device().type),
        scale=None,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return directory


def recipe_of(model: Path, small: bool, layers: str = "local") -> Any:
    from mugrpo_megatron.recipe import Recipe

    length = 64 if small else 1024
    table: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": length // 8},
        "rollout": {"prompts_per_update": 2, "responses_per_prompt": 8, "max_response_tokens": length - length // 8},
        "learner": {"micro_batch_tokens": 16 * length, "layers": layers},
        "engine": {"memory_fraction": 0.6, "max_running_requests": 256, "extra": attention()},
    }
    return Recipe.model_validate(table)


def sample_update(recipe: Any, vocab: int) -> tuple[list[Any], np.ndarray]:
    """An update of full-length responses: packed rows without padding."""
    from mugrpo_megatron.samples import Sample

    rng = np.random.default_rng(0)
    prompt, response = recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens
    samples = [
        Sample(
            group=index // 8,
            problem=str(index // 8),
            prompt_ids=rng.integers(0, vocab, prompt).astype(np.int32),
            response_ids=rng.integers(0, vocab, response).astype(np.int32),
            engine_logprobs=logprobs,
            behaviour_logprobs=logprobs,
            reward=float(index % 2),
            weight_version=0,
            finish_reason="length",
        )
        for index, logprobs in enumerate(rng.normal(-11, 0.3, (16, response)).astype(np.float32))
    ]
    return samples, rng.normal(size=16).astype(np.float32)


def learner(small: bool) -> Result:
    """One update with micro-batches of 16,384 packed tokens; also with Transformer Engine's layers, if installed.

    `share_of_matmul` is of the large product that is measured here; `mfu` of the data sheet's FLOP/s, as a run logs it.
    """
    peak_flops = ceilings(small)["matmul_flops"]
    names = ["small"] if small else ["Qwen2.5-0.5B", "Qwen2.5-1.5B"]
    engine = device().type == "cuda" and find_spec("transformer_engine")
    kinds = ["local", *(("transformer_engine", "fp8_tensorwise", "fp8_blockwise") if engine else ())]
    measured = {
        f"{name}, {layers} layers": one_learner(name, small, peak_flops, layers) for name in names for layers in kinds
    }
    return {"matmul_flops": peak_flops, **measured}


def one_learner(name: str, small: bool, peak_flops: float, layers: str) -> Result:
    from mugrpo_megatron.extras.plan.case import make_case
    from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
    from mugrpo_megatron.extras.plan.memory import PackedRows, learner_memory
    from mugrpo_megatron.extras.plan.time import token_flops
    from mugrpo_megatron.learner.groups import shutdown
    from mugrpo_megatron.learner.learner import build_learner
    from mugrpo_megatron.learner.update import update
    from mugrpo_megatron.observe.environment import peak_flops as peak_of_data_sheet

    cuda = device().type == "cuda"
    gc.collect()  # a learner is a cycle of references: the one before would count as this one's memory
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(save_random(name, Path(folder)), small, layers)
        mine = build_learner(recipe)
    samples, advantages = sample_update(recipe, SHAPES[name][-1])
    taken = seconds(lambda: update(mine, samples, advantages), repeats=2 if small else 5)
    shutdown()
    tokens = sum(sample.tokens for sample in samples)
    trained = sum(len(sample.response_ids) for sample in samples)
    work = token_flops(mine.architecture, tokens / len(samples))
    flops = 3 * (tokens * (work.layers + work.attention) + trained * work.head)
    data_sheet = peak_of_data_sheet(torch.cuda.get_device_name()) if cuda else None
    case = make_case(recipe, mine.architecture, {}, make_cluster(1, 1, "h200" if cuda else "cpu"), Assumptions())
    return {
        "update_s": taken,
        "tokens_per_s": tokens / taken,
        "share_of_matmul": flops / taken / peak_flops,
        "mfu": flops / taken / data_sheet if data_sheet else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "planned_bytes": learner_memory(case, PackedRows(tokens, 1), pp_stage=0).total,
    }


def engine_bare(small: bool) -> Result:
    """Tokens/s of SGLang's own `generate`, all prompts in one call."""
    from mugrpo_megatron.cuda import finds_cuda
    from mugrpo_megatron.engine.launch import engine_arguments, engine_environment
    from mugrpo_megatron.run.engine_spec import engine_spec

    with tempfile.TemporaryDirectory() as folder:
        model = save_random("small" if small else "Qwen2.5-1.5B", Path(folder) / "model")
        recipe = recipe_of(model, small)
        cuda = finds_cuda()
        os.environ.update(engine_environment(recipe.engine, model, cuda))
        import sglang  # reads the environment at import

        bare = sglang.Engine(**engine_arguments(engine_spec(recipe), model, cuda))
        limit = recipe.rollout.max_response_tokens
        settings = {"temperature": 1.0, "max_new_tokens": limit}
        inputs = [ids for ids in prompt_ids(small) for _ in range(RESPONSES)]
        taken = seconds(
            lambda: bare.generate(input_ids=inputs, sampling_params=settings, return_logprob=True), repeats=2
        )
        bare.shutdown()
    return {"tokens_per_s": len(inputs) * limit / taken}


def engine_ours(small: bool) -> Result:
    """Tokens/s of the project's engine process on the same prompts."""
    from mugrpo_megatron.engine.client import Engine
    from mugrpo_megatron.engine.wire import Sampling
    from mugrpo_megatron.run.engine_spec import engine_spec
    from mugrpo_megatron.samples import Problem, Prompt

    with tempfile.TemporaryDirectory() as folder:
        model = save_random("small" if small else "Qwen2.5-1.5B", Path(folder) / "model")
        recipe = recipe_of(model, small)
        prompts = [Prompt(i, Problem(str(i), "", ""), ids) for i, ids in enumerate(prompt_ids(small))]
        sampling = Sampling(1.0, 1.0, recipe.rollout.max_response_tokens, ())
        mine = Engine.start(engine_spec(recipe), model, Path(folder) / "engine.log")
        try:
            taken = seconds(lambda: list(mine.generate(prompts, RESPONSES, sampling)), repeats=2)
        finally:
            mine.stop()
    return {"tokens_per_s": len(prompts) * RESPONSES * recipe.rollout.max_response_tokens / taken}


def prompt_ids(small: bool) -> list[list[int]]:
    return [[3 + (index * step) % 500 for step in (1, 7, 31, 57, 111)] for index in range(8 if small else 128)]


def switch(small: bool) -> Result:
    """Seconds of the switch from learner to engine and back, as in phases/generate.py."""
    from mugrpo_megatron.engine.client import Engine
    from mugrpo_megatron.learner.learner import build_learner
    from mugrpo_megatron.recipe.systems import SYNC_BUCKET_BYTES
    from mugrpo_megatron.run.engine_spec import engine_spec
    from mugrpo_megatron.weights.sync import build_weight_sync, sync

    with tempfile.TemporaryDirectory() as folder:
        model = save_random("small" if small else "Qwen2.5-1.5B", Path(folder) / "model")
        recipe = recipe_of(model, small)
        engine = Engine.start(engine_spec(recipe), model, Path(folder) / "engine.log")
        try:
            engine.wait_ready()
            engine.sleep()
            mine = build_learner(recipe)
            chunks = mine.models
            weight_sync = build_weight_sync(chunks, mine.architecture, SYNC_BUCKET_BYTES, recipe.engine.tensor)
            rounds = [one_switch(mine, weight_sync, engine, sync) for _ in range(4)][1:]
        finally:
            engine.stop()
    found = {name: statistics.median(round_[name] for round_ in rounds) for name in rounds[0]}
    copy = ceilings(small)["copy_bytes_per_s"]
    return {**found, "bridge_bytes_per_s": weight_sync.plan.bytes / found["sync"], "copy_bytes_per_s": copy}


def one_switch(mine: Any, weight_sync: Any, engine: Any, sync: Any) -> dict[str, float]:
    """Seconds of each step."""

    steps: dict[str, Callable[[], object]] = {
        "optimizer_sleeps": lambda: mine.offload("optimizer"),
        "engine_weights_wake": lambda: engine.wake("weights"),
        "sync": lambda: sync(weight_sync, engine, version=1),
        "learner_weights_sleep": lambda: mine.offload("weights"),
        "engine_cache_wakes": lambda: engine.wake("kv_cache"),
        "engine_sleeps": engine.sleep,
        "learner_wakes": mine.reload,
    }
    found = {}
    for name, step in steps.items():
        wait()
        started = time.perf_counter()
        step()
        wait()
        found[name] = time.perf_counter() - started
    return found
