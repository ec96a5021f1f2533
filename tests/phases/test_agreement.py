"""Engine and learner are compared on a few texts before anything is generated, in real engines."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mugrpo_megatron.checks.agreement import bound
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.errors import EngineFailure, TrainingFailure
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.phases.agreement import Expected, check_agreement, expected_logprobs, texts_of
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.engines import Engines
from mugrpo_megatron.run.leader import Leader
from mugrpo_megatron.run.world import World
from mugrpo_megatron.weights.config import transformers_config
from mugrpo_megatron.weights.families import read_architecture
from tests import models
from tests.ranks import run_ranks
from tests.weights.test_rope import PUBLISHED

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13], [100, 3], [17, 120, 44, 90, 31, 77]]


def test_texts_are_the_prompts_one_after_another() -> None:
    texts = texts_of([[1, 2, 3], [], [4]], 3, 5)
    assert [text.tolist() for text in texts] == [[1, 2, 3, 4, 1], [2, 3, 4, 1, 2], [3, 4, 1, 2, 3]]
    assert texts_of([], 3, 5) == texts_of([[]], 3, 5) == []


def recipe(model: Path, dtype: str = "float32", response: int = 96) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": model, "dtype": dtype},
            "learner": {"threads": 1},
            "engine": {"max_running_requests": 8, "extra": {"max_total_tokens": 4096}},
            "data": {"max_prompt_tokens": 32},
            "rollout": {"max_response_tokens": response, "temperature": 0.7},
        }
    )


def one_rank(recipe: Recipe, engine: Any, prepared: Any = None) -> tuple[Any, Engines]:
    """What `phases.agreement` uses of a run, and its engine."""
    unused: Any = None
    leader = Leader(engine=engine, slot=unused, verifier=unused, tokenizer=unused, problems=prepared, sampling=unused)
    world = World(engines=1)
    return SimpleNamespace(recipe=recipe, world=world), Engines(world, recipe.engine, unused, leader)


def seen_by_run(recipe: Recipe, engine_model: Path) -> dict[str, Any]:
    """What a run with these parts says and logs; its engine has the weights and the config of `engine_model`."""
    engine = Engine.start(engine_spec(recipe), engine_model, recipe.model.directory.with_suffix(".log"))
    try:
        learner = build_learner(recipe)
        engine.wait_ready()
        prepared: Any = SimpleNamespace(train=SimpleNamespace(prompts=PROMPTS))
        run, engines = one_rank(recipe, engine, prepared)
        expected = expected_logprobs(run, learner, engines)
        assert expected is not None
        seen: dict[str, Any] = {"texts": expected.texts, "learner": expected.logprobs, "said": ""}
        try:
            seen |= check_agreement(run, engines, expected)
        except TrainingFailure as failure:
            seen["said"] = str(failure)
        seen["agreed"] = engines.agreed
        seen["again"] = expected_logprobs(run, learner, engines) is not None
        return seen
    finally:
        engine.stop()


def by_transformers(directory: Path, texts: list[np.ndarray]) -> np.ndarray:
    """Log-probabilities of all but the first token of each text."""
    config = transformers_config(directory, read_architecture(directory))
    model = AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor(np.stack(texts)).long()
    with torch.no_grad():
        logprobs = model.eval()(ids).logits.log_softmax(-1)[:, :-1]
    return np.asarray(logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1))


NIGHTLY = [name for name in PUBLISHED if name != "DeepSeek-R1-0528-Qwen3-8B"]


@pytest.mark.process
@pytest.mark.parametrize(
    "name", ["DeepSeek-R1-0528-Qwen3-8B", *(pytest.param(name, marks=pytest.mark.night) for name in NIGHTLY)]
)
def test_learner_engine_and_transformers_agree_on_published_ropes(name: str, tmp_path: Path) -> None:
    family, more = PUBLISHED[name]
    models.save_model(tmp_path / "hf", family)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for key in ("rope_parameters", "rope_theta"):
        config.pop(key, None)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **more}))
    [seen] = run_ranks(1, seen_by_run, recipe(tmp_path / "hf"), tmp_path / "hf")
    assert (seen["said"], seen["agreed"], seen["again"]) == ("", True, False)
    assert seen["texts_mismatch"] < 2e-5
    expected = by_transformers(tmp_path / "hf", seen["texts"])
    assert np.abs(np.stack(seen["learner"]) - expected).mean() < 2e-5
    print(
        f"{name}: engine {seen['texts_mismatch']:.2e}, "
        f"transformers {np.abs(np.stack(seen['learner']) - expected).mean():.2e} nats a token from the learner"
    )


@pytest.mark.process
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.night)])
def test_a_run_ends_where_the_engine_computes_another_model(dtype: str, tmp_path: Path) -> None:
    models.save_model(tmp_path / "hf", "llama", head_dim=16)
    models.save_model(tmp_path / "other", "llama", head_dim=16)
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_is_neox_style": False}))
    [seen] = run_ranks(1, seen_by_run, recipe(tmp_path / "hf", dtype), tmp_path / "other")
    assert "they compute different models" in seen["said"]
    assert seen["said"].endswith("Nothing was generated")
    assert (seen["agreed"], seen["again"]) == (False, True)
    print(dtype, seen["said"])


@pytest.mark.process
@pytest.mark.night
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_rounding_in_bfloat16_is_far_from_its_bound(family: str, tmp_path: Path) -> None:
    models.save_model(tmp_path / "hf", family)
    [seen] = run_ranks(1, seen_by_run, recipe(tmp_path / "hf", "bfloat16"), tmp_path / "hf")
    assert seen["texts_mismatch"] < bound("bfloat16")
    print(f"{family}: {seen['texts_mismatch']:.2e} nats a token in bfloat16")


def test_an_engine_that_fails_is_compared_after_its_restart() -> None:
    def dies(sampling: Any) -> Any:
        raise EngineFailure("it died")

    run, engines = one_rank(recipe(Path("x")), SimpleNamespace(running=True, generation=dies))
    text = np.arange(4, dtype=np.int32)
    assert check_agreement(run, engines, Expected([text], [np.zeros(3, np.float32)], ())) == {}
    assert not engines.agreed
    assert engines.leader
    assert engines.leader.failures_in_a_row == 1
    assert check_agreement(run, engines, None) == {}
