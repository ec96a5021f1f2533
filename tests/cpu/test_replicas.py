"""Replicas of an engine on CPU: how many there are, what each gets, and that they answer as one engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mugrpo_megatron.cpu.sglang import LARGEST_WEIGHTS, replica_arguments, replicas_of
from mugrpo_megatron.engine import client
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.recipe.systems import EngineSection
from mugrpo_megatron.samples import Problem, Prompt
from tests.engine.tiny import group_processes, named_tensors, prompts, recipe, save_checkpoint

GREEDY = Sampling(temperature=0.0, top_p=1.0, max_tokens=12, stop_ids=())
SAMPLED = Sampling(temperature=1.0, top_p=1.0, max_tokens=12, stop_ids=())


@pytest.mark.parametrize(
    ("engine", "weight_bytes", "engines", "cores", "expected"),
    [
        ({}, 1000, 1, 2, 2),
        ({}, 1000, 1, 1, 1),
        ({}, 1000, 1, 64, 2),
        ({}, 1000, 2, 2, 1),
        ({}, 1000, 2, 4, 2),
        ({"tensor": 2}, 1000, 1, 64, 1),
        ({}, LARGEST_WEIGHTS + 1, 1, 64, 1),
        ({}, 1000, 1, None, 1),
    ],
)
def test_how_many(engine: dict[str, int], weight_bytes: int, engines: int, cores: int | None, expected: int) -> None:
    assert replicas_of(EngineSection(**engine), weight_bytes, engines, cores) == expected


@given(st.integers(1, 3000), st.integers(0, 10**6), st.integers(1, 5))
def test_replicas_share_requests_and_cache(requests: int, tokens: int, replicas: int) -> None:
    whole: dict[str, Any] = {"max_running_requests": requests, "context_length": 40, "random_seed": 7, "device": "cpu"}
    whole |= {"max_total_tokens": max(tokens, 40)} if tokens else {}
    found = replica_arguments(whole, replicas)
    assert len(found) == len({one["random_seed"] for one in found}) == replicas
    assert found[0]["random_seed"] == 7
    assert requests <= sum(one["max_running_requests"] for one in found) < requests + replicas
    if tokens:
        assert sum(one["max_total_tokens"] for one in found) >= whole["max_total_tokens"]
        assert all(40 <= one["max_total_tokens"] <= whole["max_total_tokens"] for one in found)
    assert all(one["device"] == "cpu" for one in found)


@pytest.mark.process
def test_two_replicas_answer_as_one_engine(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same weights, other random streams, each answers; new weights reach both; it fails with either."""
    monkeypatch.setattr(client, "replicas", lambda *_: 2)
    engine = Engine.start(recipe(checkpoint), checkpoint, tmp_path / "engine.log")
    try:
        before = {schedulers.pid: schedulers.cpu_times().user for schedulers in _schedulers(engine)}
        assert len(before) == 2
        greedy = {
            prompt.index: [r.ids.tolist() for r in group] for prompt, group in engine.generate(prompts(40), 2, GREEDY)
        }
        assert sorted(greedy) == list(range(40))
        assert all(first == second for first, second in greedy.values())
        assert all(one.cpu_times().user > before[one.pid] for one in _schedulers(engine))

        same = [Prompt(i, Problem(f"tiny:{i}", "", ""), [3, 5, 7]) for i in range(32)]
        texts = Counter(tuple(r.ids.tolist()) for _, group in engine.generate(same, 4, SAMPLED) for r in group)
        assert max(texts.values()) == 1, "two replicas draw the same random numbers"

        other = save_checkpoint(tmp_path / "other", seed=1)
        tensors = load_file(other / "model.safetensors")
        engine.load_bucket([named_tensors(tensors) for _ in range(engine.readers)])
        engine.set_version(3)
        assert len(engine.checksums()) == 1  # RuntimeError where replicas differ
        changed = {prompt.index: group[0] for prompt, group in engine.generate(prompts(40), 2, GREEDY)}
        assert all(response.weight_version == 3 for response in changed.values())
        assert sum(changed[i].ids.tolist() == greedy[i][0] for i in range(40)) < 10

        host = engine._host
        assert host
        _schedulers(engine)[1].kill()
        with pytest.raises(EngineFailure, match="host process is gone"):
            list(engine.generate(prompts(40), 2, GREEDY))
        assert group_processes(host.pid) == []
    finally:
        engine.stop()


def _schedulers(engine: Engine) -> list[psutil.Process]:
    engine.wait_ready()
    assert engine._host
    return [one for one in group_processes(engine._host.pid) if one.name().startswith("sglang::schedul")]
