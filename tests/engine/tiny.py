"""Shared by the engine's tests: a 115k-parameter Qwen2, a recipe for it, prompts, samples."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.multiprocessing

from mugrpo_megatron.engine.launch import EngineSpec
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.samples import Problem, Prompt, Sample
from tests import models
from tests.patience import PATIENCE_S

VOCABULARY = 512


def save_checkpoint(directory: Path, seed: int, positions: int = 256) -> Path:
    """A small random Qwen2 whose next-token distributions are far from uniform."""
    models.save_model(
        directory,
        seed=seed,
        scale=9.0,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return directory


def recipe(checkpoint: Path, **engine: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": checkpoint, "dtype": "float32"},
            "data": {"max_prompt_tokens": 32},
            "rollout": {"max_response_tokens": 200},
            "engine": {"max_running_requests": 64, "request_timeout_s": PATIENCE_S, **engine},
        }
    )


def spec(checkpoint: Path, **engine: object) -> EngineSpec:
    return engine_spec(recipe(checkpoint, **engine))


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, Problem(f"tiny:{i}", "", ""), [3 + i % 500, 5, 7 + i % 11]) for i in range(count)]


def group(index: int, responses: int = 4, tokens: int = 6, seed: int = 0) -> list[Sample]:
    """A group of samples whose content follows from its index and the seed."""
    generator = np.random.default_rng([seed, index])
    return [
        Sample(
            group=index,
            problem=f"tiny:{index}",
            prompt_ids=generator.integers(0, VOCABULARY, 3 + index % 4, dtype=np.int32),
            response_ids=generator.integers(0, VOCABULARY, length, dtype=np.int32),
            engine_logprobs=-generator.random(length, dtype=np.float32),
            reward=float(generator.integers(0, 2)),
            weight_version=7,
            finish_reason="stop" if length < tokens else "length",
            text=f"response {number} of {index}: é\n",
            gold=str(index),
            extracted=str(number),
            why="differs" if number else "",
            components={"math": 1.0 + number, "format": 0.5} if index % 3 else {},
            advantage=None if index % 2 else 0.25 * number,
            row='{"question": "?"}' if index % 2 else "",
        )
        for number, length in enumerate(generator.integers(1, tokens + 1, responses).tolist())
    ]


def named_tensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """All tensors in shared memory, as one reader of a CPU engine takes them."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    return bytes(ForkingPickler.dumps(list(tensors.items())))


def group_processes(process_group: int) -> list[psutil.Process]:
    """Every process of a process group that has not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == process_group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
