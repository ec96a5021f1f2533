"""What the ranks of the sync tests do: a learner of theirs feeds one real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.update import token_logprobs
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Problem, Prompt, Response, Sample
from mugrpo_megatron.weights.check import WeightMismatch, check
from mugrpo_megatron.weights.hf import load_hf
from mugrpo_megatron.weights.sync import build_bridge, sync

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13], [100, 3]]


def feed_engine(recipe: Recipe, other: Path, bucket_bytes: int) -> dict[str, Any]:
    """Sync a learner with the weights of `other` into an engine on `model.path`; rank 0 returns what was seen."""
    rank = dist.get_rank()
    engine = Engine.start(recipe, recipe.model.path, other.with_suffix(".log")) if rank == 0 else None
    try:
        learner = build_learner(recipe)
        chunks = [policy(chunk) for chunk in learner.chunks]
        bridge = build_bridge(chunks, learner.architecture, bucket_bytes, recipe.engine.tensor)
        if engine:
            engine.wait_ready()
        seen: dict[str, Any] = {"equal_at_start": check(bridge, engine), "at_start": disagreement(learner, engine)}
        load_hf(chunks, other, learner.architecture)
        seen["unsynced"] = disagreement(learner, engine)
        try:
            check(bridge, engine)
        except WeightMismatch as error:
            seen["refused"] = str(error)
        stats = sync(bridge, engine, version=7)
        seen |= {"equal": check(bridge, engine), "synced": disagreement(learner, engine), "buckets": stats.buckets}
        sync(bridge, engine, version=8)
        seen |= {"again": disagreement(learner, engine), "version": engine.version if engine else None}
        return seen
    finally:
        if engine:
            engine.stop()


def disagreement(learner: Learner, engine: Engine | None) -> float:
    """Largest |learner - engine| log-probability over sampled responses; collective."""
    sampled: list[Any] = [None]
    if engine:
        prompts = [Prompt(index, Problem(str(index), "", ""), ids) for index, ids in enumerate(PROMPTS)]
        sampled = [list(engine.generate(prompts, 4, Sampling(1.0, 1.0, 16, ())))]
    dist.broadcast_object_list(sampled)
    responses = [(prompt, response) for prompt, group in sampled[0] for response in group]
    found = token_logprobs(learner, [sample(prompt, response) for prompt, response in responses])
    return max(
        float(np.abs(mine - response.logprobs).max()) for mine, (_, response) in zip(found, responses, strict=True)
    )


def sample(prompt: Prompt, response: Response) -> Sample:
    return Sample(
        prompt.index,
        prompt.problem.id,
        np.array(prompt.ids, dtype=np.int32),
        response.ids,
        response.logprobs,
        0.0,
        response.weight_version,
        response.finish_reason,
    )
