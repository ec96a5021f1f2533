"""Measures a learner's memory: every allocation of torch's CPU allocator, as the profiler records it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Sample

MEASURED = 3
"""Updates whose peak is measured where ranks talk."""


def allocations(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """What `work` returns, the bytes that it left allocated, and its peak."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = work()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = np.cumsum([0, *(size for _, size in changes)])
    return result, int(held[-1]), int(held.max())


def learner_bytes(sections: dict[str, Any], responses: int, prompt: int, response: int, vocab: int) -> tuple[int, int]:
    """(state, peak of an update besides the state) of this rank, on `responses` equally long responses.

    The first update is not measured: it also allocates what is allocated once. Of several ranks' others the smallest
    peak counts: gloo's own thread frees a collective's buffers, sometimes after the next ones are allocated.
    """
    learner, state, _ = allocations(lambda: build_learner(Recipe.model_validate(sections)))
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            group=index // 4,
            problem=str(index // 4),
            prompt_ids=rng.integers(0, vocab, prompt).astype(np.int32),
            response_ids=rng.integers(0, vocab, response).astype(np.int32),
            engine_logprobs=np.zeros(response, np.float32),
            behaviour_logprobs=rng.normal(-8, 0.1, response).astype(np.float32),
            reward=float(index % 2),
            weight_version=0,
            finish_reason="stop",
        )
        for index in range(responses)
    ]
    advantages = rng.normal(size=responses).astype(np.float32)
    update(learner, samples, advantages)
    measured = MEASURED if dist.get_world_size() > 1 else 1
    return state, min(allocations(lambda: update(learner, samples, advantages))[2] for _ in range(measured))


def save_random(directory: Path, config: dict[str, Any]) -> Path:
    """A float32 checkpoint of the model that a transformers config describes, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings))
    model.float().save_pretrained(directory)
    return directory
