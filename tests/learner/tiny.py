"""A tiny policy, its recipe and samples: small enough that every layout trains it within seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from megatron.core.distributed import DistributedDataParallelConfig

from mugrpo_megatron.learner import model as layers
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.linear import DirectLayers
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Sample
from tests import models

VOCAB = 90
Updates = tuple[dict[str, float], dict[str, float], np.ndarray]
"""Metrics of two updates, and the log-probabilities of all tokens after them."""


def save_model(directory: Path, tied: bool = True, vocab: int = VOCAB, layers: int = 4) -> Path:
    """A Qwen2 checkpoint with random weights."""
    models.save_model(
        directory, tie_word_embeddings=tied, vocab_size=vocab, num_hidden_layers=layers, max_position_embeddings=128
    )
    return directory


def recipe(directory: Path, **sections: dict[str, Any]) -> Recipe:
    """float32, one thread, several micro-batches an update; `sections` are merged over that."""
    table: dict[str, dict[str, Any]] = {
        "model": {"path": str(directory), "dtype": "float32"},
        "optimizer": {"lr": 1e-3},
        "learner": {"threads": 1, "micro_batch_tokens": 160, "loss_chunk_tokens": 16},
        "rollout": {"max_response_tokens": 24},
    }
    for name, values in sections.items():
        table[name] = {**table.get(name, {}), **values}
    return Recipe.model_validate(table)


def samples(prompts: int = 6, responses: int = 4, seed: int = 0) -> list[Sample]:
    """Random prompts and responses of uneven lengths, some rewarded; behaviour logprobs are a guess of -4.5 +- 0.3."""
    rng = np.random.default_rng(seed)
    result = []
    for group in range(prompts):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 12)).astype(np.int32)
        for _ in range(responses):
            length = int(rng.integers(1, 20))
            response = rng.integers(0, VOCAB, length).astype(np.int32)
            behaviour = rng.normal(-4.5, 0.3, length).astype(np.float32)
            reward = float(rng.integers(0, 2))
            sample = Sample(group, f"p{group}", prompt, response, behaviour, reward, 0, "stop")
            result.append(replace(sample, behaviour_logprobs=behaviour))
    return result


def left_behind(data: list[Sample]) -> list[Sample]:
    """The same samples, every seventh token from the fourth on e^14 times as likely as before when it was sampled.

    Whatever the model now gives such a token, its ratio is below 1e-4: a trigger where the advantage is negative.
    """
    for sample in data:
        sample.engine_logprobs[3::7] += 14
    return data


def advantages(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def save_routed(directory: Path) -> Path:
    """A mixture of experts of the same vocabulary."""
    models.save_model(directory, "qwen3_moe", vocab_size=VOCAB, moe_intermediate_size=16, num_hidden_layers=2)
    return directory


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Linear layers that add to `main_grad`, and gradients reduced early, in small buckets."""
    buckets = partial(DistributedDataParallelConfig, bucket_size=1000)
    with (
        patch.object(layers, "choose_backend", lambda *_: DirectLayers()),
        patch.object(layers, "reduces_early", lambda ranks: ranks.dp_size * ranks.cp_size > 1),
        patch.object(layers, "DistributedDataParallelConfig", buckets),
    ):
        yield


def two_updates(model: str, sections: dict[str, dict[str, Any]]) -> Updates:
    """What a rank does where updates of several layouts are compared."""
    return updates_of(build_learner(recipe(Path(model), **sections)))


def updates_of(learner: Learner) -> Updates:
    data = left_behind(samples())
    first, second = (update(learner, data, advantages(len(data))) for _ in range(2))
    return first, second, np.concatenate(token_logprobs(learner, data))


def assert_same_updates(result: Updates, alone: Updates) -> None:
    """Adam's first step amplifies rounding, so what comes after it is compared less closely."""
    for name in ("loss", "grad_norm"):
        assert result[0][name] == pytest.approx(alone[0][name], rel=1e-4)
        assert result[1][name] == pytest.approx(alone[1][name], rel=2e-3, abs=2e-4)
    assert result[0]["vetoed_fraction"] == alone[0]["vetoed_fraction"]
    np.testing.assert_allclose(result[2], alone[2], atol=2e-3)
