"""Engine and learner take turns on the device that there is: generation, sleep, sync, the comparison of all weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.update import token_logprobs, update
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import sync_bucket_bytes
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.samples import Problem, Prompt, Response, Sample
from mugrpo_megatron.weights.check import compare_weights
from mugrpo_megatron.weights.sync import build_weight_sync, sync
from tests.gpu.tiny import CUDA, save_model, sections

PROMPTS = [Prompt(i, Problem(str(i), "", ""), [3 + (i * step) % 40 for step in (1, 7, 31)]) for i in range(16)]
RESPONSES = 4
SAMPLING = Sampling(1.0, 1.0, 16, ())
GIB = 1 << 30


def as_sample(prompt: Prompt, response: Response, version: int) -> Sample:
    ids = np.array(prompt.ids, dtype=np.int32)
    reward = float(len(response.ids) % 2)
    logprobs = response.logprobs
    sample = Sample(prompt.index, "", ids, response.ids, logprobs, reward, version, response.finish_reason)
    return replace(sample, behaviour_logprobs=logprobs)


def generate(engine: Engine, version: int) -> list[Sample]:
    groups = list(engine.generate(PROMPTS, RESPONSES, SAMPLING))
    assert len(groups) == len(PROMPTS)
    responses = [(prompt, response) for prompt, group in groups for response in group]
    assert {response.weight_version for _, response in responses} == {version}
    return [as_sample(prompt, response, version) for prompt, response in responses]


def mismatch(learner: Any, samples: list[Sample]) -> float:
    """Mean distance of the engine's log-probabilities from the learner's, in nats."""
    own = np.concatenate(token_logprobs(learner, samples))
    return float(np.abs(own - np.concatenate([sample.engine_logprobs for sample in samples])).mean())


@pytest.mark.process
@pytest.mark.night
def test_they_take_turns(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    recipe = Recipe.model_validate(
        sections(model={"path": str(save_model(tmp_path / "model"))}, optimizer={"lr": 1e-3})
    )

    def timed(step: str, action: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = action()
        record_property(f"{step}, s", round(time.perf_counter() - started, 2))
        return result

    def free() -> int:
        return torch.cuda.mem_get_info()[0] if CUDA else 0

    engine = Engine.start(engine_spec(recipe), recipe.model.directory, tmp_path / "engine.log")
    try:
        timed("start", engine.wait_ready)
        samples = timed("first generation", lambda: generate(engine, 0))
        awake = free()
        timed("sleep", engine.sleep)
        assert free() > awake + 10 * GIB or not CUDA
        learner = timed("learner", lambda: build_learner(recipe))
        record_property("mismatch before, nats", mismatch(learner, samples))
        assert mismatch(learner, samples) < 0.02
        timed("first update", lambda: update(learner, samples, np.resize([1.0, -1.0], len(samples)).astype(np.float32)))
        chunks = [policy(chunk) for chunk in learner.chunks]
        weight_sync = build_weight_sync(chunks, learner.architecture, sync_bucket_bytes(CUDA), recipe.engine.tensor)
        for version in (1, 2):
            timed("optimizer offloaded", lambda: learner.offload("optimizer"))
            timed("engine's weights wake", lambda: engine.wake("weights"))
            timed(f"sync {version}", partial(sync, weight_sync, engine, version))
            assert timed("check of every weight", lambda: compare_weights(weight_sync, engine)) > 0
            timed("learner offloaded", lambda: learner.offload("weights"))
            timed("cache wakes", lambda: engine.wake("kv_cache"))
            samples = timed("generation", partial(generate, engine, version))
            timed("sleep", engine.sleep)
            timed("learner reloaded", learner.reload)
            record_property("mismatch after the sync, nats", mismatch(learner, samples))
            assert mismatch(learner, samples) < 0.02
            update(learner, samples, np.resize([1.0, -1.0], len(samples)).astype(np.float32))
    finally:
        engine.stop()
