"""Mixtures of experts: the same update in every layout, expert parallelism included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch._dynamo
from megatron.core.transformer.transformer_config import TransformerConfig

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner import model as learner_model
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.model import transformer_config
from mugrpo_megatron.learner.update import token_logprobs, update
from tests import models
from tests.learner.test_checkpoint import resume, train_and_save
from tests.learner.tiny import VOCAB, advantages, recipe, samples
from tests.ranks import run_ranks

pytestmark = pytest.mark.process


def two_updates(
    model: str, sections: dict[str, dict[str, Any]]
) -> tuple[dict[str, float], dict[str, float], np.ndarray]:
    learner = build_learner(recipe(Path(model), **sections))
    data = samples()
    first = update(learner, data, advantages(len(data)))
    second = update(learner, data, advantages(len(data)))
    return first, second, np.concatenate(token_logprobs(learner, data))


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.night)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("experts")
    models.save_model(directory, request.param, vocab_size=VOCAB, moe_intermediate_size=16, num_hidden_layers=2)
    return str(directory)


@pytest.fixture(scope="module")
def alone(model: str) -> Any:
    return run_ranks(1, two_updates, model, {})[0]


LAYOUTS = {
    "ep2": (2, {"parallel": {"expert": 2}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2 ep2": (4, {"parallel": {"pipeline": 2, "expert": 2}}),
    "full recompute": (1, {"learner": {"recompute": "full"}}),
}


def refusal(model: str, sections: dict[str, dict[str, Any]]) -> str:
    with pytest.raises(UserError) as refused:
        build_learner(recipe(Path(model), **sections))
    return str(refused.value)


def test_what_gloo_cannot_gather_is_refused_on_cpu(model: str) -> None:
    sections = {"parallel": {"tensor": 2, "expert": 2}}
    for said in run_ranks(4, refusal, model, sections):
        assert "tensor 2 with expert 2 needs CUDA" in said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_is_that_of_one_process(layout: str, model: str, alone: Any) -> None:
    world, sections = LAYOUTS[layout]
    first, second, logprobs = alone
    for rank in run_ranks(world, two_updates, model, sections):
        assert rank[0]["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert rank[0]["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
        assert rank[1]["loss"] == pytest.approx(second["loss"], rel=2e-3)
        assert rank[1]["grad_norm"] == pytest.approx(second["grad_norm"], rel=2e-3)
        np.testing.assert_allclose(rank[2], logprobs, atol=2e-3)


def two_updates_as_on_cuda(model: str) -> tuple[dict[str, float], dict[str, float], np.ndarray]:
    """On CPU, with the fused SwiGLU that experts have on CUDA, not compiled: that takes a minute."""

    def fused(*arguments: Any) -> TransformerConfig:
        return replace(transformer_config(*arguments), bias_activation_fusion=True)

    torch._dynamo.config.disable = True
    with patch.object(learner_model, "transformer_config", fused):
        return two_updates(model, {})


def test_experts_on_cuda_compute_what_they_do_on_cpu(model: str, alone: Any) -> None:
    first, second, logprobs = run_ranks(1, two_updates_as_on_cuda, model)[0]
    assert first["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-5)
    assert second["grad_norm"] == pytest.approx(alone[1]["grad_norm"], rel=2e-3)
    np.testing.assert_allclose(logprobs, alone[2], atol=2e-3)


def test_a_checkpoint_goes_on_without_expert_parallelism(model: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    unbroken = run_ranks(2, train_and_save, model, directory, {"parallel": {"expert": 2}})[0]
    [(_, _, metrics)] = run_ranks(1, resume, model, directory, {})
    for again, before in zip(metrics, unbroken, strict=True):
        assert again["loss"] == pytest.approx(before["loss"], rel=1e-4)
        assert again["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)
