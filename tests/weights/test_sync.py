"""A learner in several layouts feeds a real engine, and the engine then computes what the learner computes.

By day one family and one engine rank: `tests/test_train.py` has an engine of two ranks and DeepSeek's shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.recipe import Recipe
from tests import models
from tests.ranks import run_ranks
from tests.weights import tiny
from tests.weights.engine_work import feed_engine

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


@pytest.mark.parametrize(
    ("family", "changes", "engine_tensor"),
    [
        ("qwen2", {"tie_word_embeddings": True, "vocab_size": 130}, 1),
        pytest.param("qwen3", {}, 2, marks=pytest.mark.night),
        pytest.param("deepseek_v3", {}, 1, marks=pytest.mark.night),
        pytest.param("deepseek_v3", {"q_lora_rank": None, "rope_parameters": YARN}, 1, marks=pytest.mark.night),
        pytest.param("glm4_moe_lite", {}, 1, marks=pytest.mark.night),
        pytest.param("glm4_moe", {}, 1, marks=pytest.mark.night),
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
        timeout_s=240,
    )
    assert seen["equal_at_start"] == seen["equal"] > 0
    assert "does not hold the learner's weights" in seen["refused"]
    assert seen["unsynced"] > 0.1, "the two checkpoints must differ for the test to mean anything"
    assert max(seen["at_start"], seen["synced"], seen["again"]) < 1e-4
    assert seen["buckets"] > 3
    assert seen["version"] == 8
