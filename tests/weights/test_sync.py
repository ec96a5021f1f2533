"""A learner in several layouts feeds a real engine, and the engine then computes what the learner computes.

By day one family and one engine rank: `tests/test_train.py` has an engine of two ranks and DeepSeek's shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.sglang_compat import has_gated_delta
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.update import token_logprobs
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.samples import Problem, Prompt, Response, Sample
from mugrpo_megatron.weights.check import WeightMismatch, compare_weights
from mugrpo_megatron.weights.hf import load_hf
from mugrpo_megatron.weights.sync import build_weight_sync, sync
from tests import models
from tests.ranks import run_ranks
from tests.weights import tiny

pytestmark = pytest.mark.process

YARN = {**tiny.YARN, "mscale": 1.0, "mscale_all_dim": 1.0}

LARGEST_PARAMETER = 16 * 1024
"""Bytes: smaller buckets than the embedding, so that some hold a single oversized tensor."""


def recipe(model: Path, engine_tensor: int) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "parallel": {"tensor": 2, "pipeline": 2},
            "learner": {"threads": 1},
            "engine": {"tensor": engine_tensor, "max_running_requests": 16, "extra": {"max_total_tokens": 4096}},
            "data": {"max_prompt_tokens": 32},
            "rollout": {"max_response_tokens": 32},
        }
    )


NEW_STACK = (
    pytest.mark.night,
    pytest.mark.skipif(not has_gated_delta(), reason="the pinned SGLang has no class for the text of Qwen3.5"),
)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13], [100, 3]]


def feed_engine(recipe: Recipe, other: Path, bucket_bytes: int) -> dict[str, Any]:
    """Sync a learner with the weights of `other` into an engine on `model.path`; rank 0 returns what was seen."""
    rank = dist.get_rank()
    engine = Engine.start(engine_spec(recipe), recipe.model.path, other.with_suffix(".log")) if rank == 0 else None
    try:
        learner = build_learner(recipe)
        chunks = [policy(chunk) for chunk in learner.chunks]
        weight_sync = build_weight_sync(chunks, learner.architecture, bucket_bytes, recipe.engine.tensor)
        if engine:
            engine.wait_ready()
        seen: dict[str, Any] = {
            "equal_at_start": compare_weights(weight_sync, engine),
            "at_start": disagreement(learner, engine),
        }
        load_hf(chunks, other, learner.architecture)
        seen["unsynced"] = disagreement(learner, engine)
        try:
            compare_weights(weight_sync, engine)
        except WeightMismatch as error:
            seen["refused"] = str(error)
        stats = sync(weight_sync, engine, version=7)
        seen |= {
            "equal": compare_weights(weight_sync, engine),
            "synced": disagreement(learner, engine),
            "buckets": stats.buckets,
        }
        sync(weight_sync, engine, version=8)
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
    result = token_logprobs(learner, [sample(prompt, response) for prompt, response in responses])
    return max(
        float(np.abs(mine - response.logprobs).max()) for mine, (_, response) in zip(result, responses, strict=True)
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


@pytest.mark.parametrize(
    ("family", "changes", "engine_tensor"),
    [
        ("qwen2", {"tie_word_embeddings": True, "vocab_size": 130}, 1),
        pytest.param("qwen3", {}, 2, marks=pytest.mark.night),
        pytest.param("deepseek_v3", {}, 1, marks=pytest.mark.night),
        pytest.param("deepseek_v3", {"q_lora_rank": None, "rope_parameters": YARN}, 1, marks=pytest.mark.night),
        pytest.param("glm4_moe_lite", {}, 1, marks=pytest.mark.night),
        pytest.param("glm4_moe", {}, 1, marks=pytest.mark.night),
        pytest.param("qwen3_5_text", {"tie_word_embeddings": True, "vocab_size": 130}, 2, marks=NEW_STACK),
        pytest.param("qwen3_5_moe_text", {}, 1, marks=NEW_STACK),
    ],
)
def test_engine_computes_with_the_learners_weights(
    tmp_path: Path, family: str, changes: dict[str, Any], engine_tensor: int
) -> None:
    models.save_model(tmp_path / "first", family, seed=0, **changes)
    models.save_model(tmp_path / "second", family, seed=1, **changes)
    seen, *_ = run_ranks(
        4,
        feed_engine,
        recipe(tmp_path / "first", engine_tensor),
        tmp_path / "second",
        LARGEST_PARAMETER,
    )
    assert seen["equal_at_start"] == seen["equal"] > 0
    assert "does not hold the learner's weights" in seen["refused"]
    assert seen["unsynced"] > 0.1, "the two checkpoints must differ for the test to mean anything"
    assert max(seen["at_start"], seen["synced"], seen["again"]) < 1e-4
    assert seen["buckets"] > 3
    assert seen["version"] == 8
