"""The engine against transformers, and its protocol; one engine serves the whole file."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mugrpo_megatron.engine import sglang_compat
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.process import _shared_memory
from mugrpo_megatron.engine.wire import Request, Sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.samples import Problem, Prompt, Response
from tests.engine.tiny import group_processes, named_tensors, prompts, recipe, save_checkpoint, spec
from tests.engine_server import forked_engines, hosts_of

pytestmark = pytest.mark.process

SAMPLED = Sampling(temperature=0.7, top_p=1.0, max_tokens=12, stop_ids=())
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_tokens=12, stop_ids=())
TOLERANCE = 1e-4
LOOPBACK = {"127.0.0.1", "::1"}
MASKED = pytest.mark.skipif(not sglang_compat.is_new(), reason="this SGLang returns no masks of its sampler")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def reference_logprobs(model: torch.nn.Module, prompt: Prompt, response: Response, temperature: float) -> np.ndarray:
    ids = torch.tensor([prompt.ids + response.ids.tolist()])
    with torch.no_grad():
        logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
    start = len(prompt.ids)
    return logprobs[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]].numpy()


def test_behaviour_logprobs_are_those_of_the_sampling_temperature(engine: Engine, reference: torch.nn.Module) -> None:
    groups = list(engine.generate(prompts(20), 4, SAMPLED))
    assert sorted(prompt.index for prompt, _ in groups) == list(range(20))
    for prompt, responses in groups:
        assert len(responses) == 4
        for response in responses:
            assert response.finish_reason == "length"
            assert response.ids.shape == response.logprobs.shape == (12,)
            assert response.ids.dtype == np.int32
            assert response.logprobs.dtype == np.float32
            expected = reference_logprobs(reference, prompt, response, SAMPLED.temperature)
            np.testing.assert_allclose(response.logprobs, expected, atol=TOLERANCE)


@pytest.mark.parametrize("most", [5, pytest.param(100, marks=MASKED)], ids=["top logprobs", "masks"])
def test_a_truncated_sampler_says_what_it_kept(engine: Engine, reference: torch.nn.Module, most: int) -> None:
    """Every response lies inside the support ids, and its logprobs are those of a softmax over them."""
    masked = most > sglang_compat.MOST_TOP_LOGPROBS
    top_p = 0.8 if masked else 0.15  # of the whole vocabulary, of which five tokens have little
    how = Sampling(0.7, top_p, 12, (), top_k=most, support_ids=True, sampling_masks=masked)
    sizes = set()
    for prompt, responses in engine.generate(prompts(8), 4, how):
        for response in responses:
            assert response.support_ids is not None
            assert len(response.support_ids) == 12
            assert response.support_ids.shape[1] <= most
            ids = torch.tensor([prompt.ids + response.ids.tolist()])
            with torch.no_grad():
                scores = reference(ids).logits[0, len(prompt.ids) - 1 : -1] / 0.7
            for place, (token, support_ids) in enumerate(
                zip(response.ids.tolist(), response.support_ids.tolist(), strict=True)
            ):
                chosen = [other for other in support_ids if other >= 0]
                assert token in chosen
                least = scores[place].topk(len(chosen)).values[-1]
                assert scores[place, chosen].min() >= least - TOLERANCE, "the most likely ones"
                found = scores[place, chosen].log_softmax(0)[chosen.index(token)].item()
                assert response.logprobs[place] == pytest.approx(found, abs=TOLERANCE)
                sizes.add(len(chosen))
    assert len(sizes) > 2, "top-p takes part"


def given(prompt: Prompt, response: Response, index: int) -> Prompt:
    """The engine's own response, for it to score."""
    ids = [*prompt.ids, *response.ids.tolist()]
    return Prompt(index, prompt.problem, ids, logprob_tokens=len(response.ids), support_ids=response.support_ids)


@pytest.mark.parametrize("support_ids", [False, True])
def test_a_score_is_what_sampling_said(engine: Engine, support_ids: bool) -> None:
    """Over the vocabulary, or over the tokens that each place kept: in pieces, as one request asks for few of them."""
    how = Sampling(1.0, 0.9, 150, (), top_k=5, support_ids=True) if support_ids else Sampling(1.0, 1.0, 150, ())
    sampled = [(prompt, one) for prompt, responses in engine.generate(prompts(3), 2, how) for one in responses]
    questions = [given(prompt, response, index) for index, (prompt, response) in enumerate(sampled)]
    scores = {prompt.index: one for prompt, (one,) in engine.generate(questions, 1, Sampling(1.0, 1.0, 1, ()))}
    for index, (_, response) in enumerate(sampled):
        np.testing.assert_array_equal(scores[index].ids, response.ids)
        np.testing.assert_allclose(scores[index].logprobs, response.logprobs, atol=TOLERANCE)


def test_greedy_is_the_argmax(engine: Engine, reference: torch.nn.Module) -> None:
    for prompt, (response,) in engine.generate(prompts(5), 1, GREEDY):
        ids = torch.tensor([prompt.ids + response.ids.tolist()])
        with torch.no_grad():
            best = reference(ids).logits[0].argmax(-1)
        assert best[len(prompt.ids) - 1 : -1].tolist() == response.ids.tolist()


def test_the_stop_token_ends_a_response_and_belongs_to_it(engine: Engine) -> None:
    free = {prompt.index: responses[0].ids for prompt, responses in engine.generate(prompts(8), 1, GREEDY)}
    stop = int(free[0][5])
    stopped = engine.generate(prompts(8), 1, Sampling(0.0, 1.0, 12, (stop,)))
    for prompt, (response,) in stopped:
        whole = free[prompt.index].tolist()
        expected = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert response.ids.tolist() == expected
        assert response.finish_reason == ("stop" if stop in whole else "length")


def test_prompts_are_pulled_as_capacity_frees_and_closing_early_aborts(engine: Engine) -> None:
    pulled = itertools.count()
    endless = (Prompt(i, prompts(1)[0].problem, [3 + i % 500, 5]) for i in pulled)
    groups = engine.generate(endless, 4, SAMPLED)
    assert isinstance(groups, Generator)
    seen = [next(groups) for _ in range(40)]
    groups.close()
    assert len(seen) == 40
    # 64 requests run at a time, so at most 32 groups of 4 are in flight besides the 40 seen and those sent with them.
    assert next(pulled) <= 40 + 3 * 32
    assert len(list(engine.generate(prompts(3), 2, SAMPLED))) == 3
    assert list(engine.generate([], 2, SAMPLED)) == []


def test_aborted_requests_leave_the_others_alone(engine: Engine) -> None:
    """Keys that begin alike too; an aborted request frees its place, and its answer need not come."""
    keys, kept = range(1, 41), {1, 12, 40}
    with engine.generation(replace(SAMPLED, max_tokens=200)):
        requests = [Request(key, [3 + key, 5], 2, key) for key in keys]
        engine.submit(requests)
        engine.abort([key for key in keys if key not in kept] + [77])
        answered: set[int] = set()
        while not kept <= answered:
            for key, responses in engine.receive_groups():
                answered.add(key)
                assert len(responses) == 2
                assert key not in kept or all(len(response.ids) == 200 for response in responses)
    assert len(list(engine.generate(prompts(3), 2, SAMPLED))) == 3


def test_weights_and_version_follow_a_sync(engine: Engine, checkpoint: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path, seed=1)
    _load(engine, other, version=5)
    norm = "model.norm.weight"
    digest = _sha256(load_file(other / "model.safetensors")[norm])
    assert engine.checksums()[0][norm] == ("float32", digest)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    for prompt, responses in engine.generate(prompts(4), 2, SAMPLED):
        for response in responses:
            assert response.weight_version == 5
            expected = reference_logprobs(model, prompt, response, SAMPLED.temperature)
            np.testing.assert_allclose(response.logprobs, expected, atol=TOLERANCE)
    _load(engine, checkpoint, version=0)


@pytest.mark.parametrize("commands", [False, True], ids=["nothing is sent", "SGLang runs what it does on CUDA"])
def test_sleeping_on_cpu_keeps_the_engine(engine: Engine, commands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if commands and torch.get_device_module() is not torch.cpu:
        pytest.skip("SGLang's release_memory_occupation waits for CUDA where torch is built with it")
    monkeypatch.setattr(engine, "_cuda", commands)
    before = engine.checksums()
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv_cache")
    assert engine.checksums() == before


def test_on_cuda_the_graphs_sleep_and_wake_with_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    sleeper = Engine(engine_spec(recipe(checkpoint)), checkpoint, tmp_path / "engine.log")
    calls: list[tuple[str, Any]] = []
    sleeper._cuda, sleeper._host = True, cast(Any, object())
    sleeper._call = lambda *call: calls.append(call)  # type: ignore[method-assign]
    for _ in range(2):
        sleeper.sleep()
    sleeper.wake("weights")
    sleeper.wake("kv_cache")
    everything = ["weights", "kv_cache", "cuda_graph"]
    assert calls == [("sleep", everything), ("wake", ["weights"]), ("wake", ["kv_cache", "cuda_graph"])]


def test_an_engine_that_was_stopped_begins_its_episodes_anew(checkpoint: Path, tmp_path: Path) -> None:
    """What played them has closed its directory and its processes."""
    players = [MagicMock(**{"generate.return_value": iter(())}) for _ in range(2)]
    spec = replace(engine_spec(recipe(checkpoint)), episodes=Mock(side_effect=players))
    engine = Engine(spec, checkpoint, tmp_path / "engine.log")
    for player in players:
        assert list(engine.generate_from(lambda waiting, slots: [], 1, SAMPLED)) == []
        engine.stop()
        assert [call[0] for call in player.method_calls] == ["generate", "close"]


def test_sockets_are_on_loopback(engine: Engine) -> None:
    engine.wait_ready()
    assert set(_listening_addresses()) <= LOOPBACK


def test_prompt_and_response_must_fit_the_model(checkpoint: Path, tmp_path: Path) -> None:
    long = Recipe.model_validate({**recipe(checkpoint).model_dump(), "rollout": {"max_response_tokens": 300}})
    with pytest.raises(UserError, match="exceed the 256 positions"):
        Engine.start(engine_spec(long), checkpoint, tmp_path / "engine.log")


def test_a_directory_without_a_model(tiny_recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a Hugging Face checkpoint"):
        Engine.start(engine_spec(tiny_recipe), tmp_path, tmp_path / "engine.log")


def test_two_replicas_answer_as_one_engine(engine: Engine) -> None:
    """Same weights, other random streams, and each answers."""
    before = {one.pid: one.cpu_times().user for one in _schedulers(engine)}
    assert len(before) == 2
    greedy = {p.index: [one.ids.tolist() for one in group] for p, group in engine.generate(prompts(40), 2, GREEDY)}
    assert sorted(greedy) == list(range(40))
    assert all(first == second for first, second in greedy.values())
    assert all(one.cpu_times().user > before[one.pid] for one in _schedulers(engine))
    same = [Prompt(i, Problem(f"tiny:{i}", "", ""), [3, 5, 7]) for i in range(32)]
    free = Sampling(temperature=1.0, top_p=1.0, max_tokens=12, stop_ids=())
    texts = Counter(tuple(one.ids.tolist()) for _, group in engine.generate(same, 4, free) for one in group)
    assert max(texts.values()) == 1, "two replicas draw the same random numbers"


def test_an_engine_without_a_compiler_answers_the_same(
    engine: Engine, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lscpu").symlink_to(str(shutil.which("lscpu")))  # SGLang asks for it
    monkeypatch.setenv("PATH", str(tmp_path))
    with forked_engines():
        plain = Engine.start(spec(checkpoint), checkpoint, tmp_path / "plain.log")
    how = Sampling(temperature=0.0, top_p=1.0, max_tokens=40, stop_ids=())
    try:
        found = [{p.index: one for p, (one,) in each.generate(prompts(24), 1, how)} for each in (engine, plain)]
    finally:
        plain.stop()
    assert ["no C compiler" in each.log.read_text() for each in (engine, plain)] == [False, True]
    for place, compiled in found[0].items():
        assert np.array_equal(compiled.ids, found[1][place].ids)
        np.testing.assert_allclose(compiled.logprobs, found[1][place].logprobs, atol=2e-4)


@pytest.mark.night
def test_two_tensor_parallel_ranks(checkpoint: Path, tmp_path: Path) -> None:
    engine = Engine.start(spec(checkpoint, tensor=2), checkpoint, tmp_path / "engine.log")
    try:
        other = save_checkpoint(tmp_path / "other", seed=2)
        _load(engine, other, version=1)
        model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
        for prompt, responses in engine.generate(prompts(4), 2, SAMPLED):
            for response in responses:
                expected = reference_logprobs(model, prompt, response, SAMPLED.temperature)
                np.testing.assert_allclose(response.logprobs, expected, atol=TOLERANCE)
        first, second = engine.checksums()
        assert first["model.norm.weight"] == second["model.norm.weight"]
        assert first["model.layers.0.mlp.down_proj.weight"] != second["model.layers.0.mlp.down_proj.weight"]
        assert set(_listening_addresses()) <= LOOPBACK
        shared = {name for host in hosts_of(os.getpid()) for name in _shared_memory(host.pid) if "sgl_shm" in name}
        assert shared
    finally:
        engine.stop()
    assert not any(Path(name).exists() for name in shared)


def _schedulers(engine: Engine) -> list[psutil.Process]:
    engine.wait_ready()
    assert engine._host
    return [one for one in group_processes(engine._host.pid) if one.name().startswith("sglang::schedul")]


def _listening_addresses() -> list[str]:
    """The sockets of every engine that this process has started."""
    members = [member for host in hosts_of(os.getpid()) for member in group_processes(host.pid)]
    assert len(members) >= 3
    return [c.laddr.ip for p in members for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]


def _load(engine: Engine, checkpoint: Path, version: int) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    # Good for one reader each.
    engine.load_bucket([named_tensors(tensors) for _ in range(engine.readers)])
    engine.set_version(version)


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
