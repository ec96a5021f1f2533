"""A tiny policy, its recipe and samples: small enough that every layout trains it within seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Sample
from tests import models

VOCAB = 90


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
    found = []
    for group in range(prompts):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 12)).astype(np.int32)
        for _ in range(responses):
            length = int(rng.integers(1, 20))
            response = rng.integers(0, VOCAB, length).astype(np.int32)
            behaviour = rng.normal(-4.5, 0.3, length).astype(np.float32)
            found.append(Sample(group, f"p{group}", prompt, response, behaviour, float(rng.integers(0, 2)), 0, "stop"))
    return found


def left_behind(data: list[Sample]) -> list[Sample]:
    """The same samples, every seventh token from the fourth on e^14 times as likely as before when it was sampled.

    Whatever the model now gives such a token, its ratio is below 1e-4: a trigger where the advantage is negative.
    """
    for sample in data:
        sample.behaviour_logprobs[3::7] += 14
    return data


def advantages(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)
