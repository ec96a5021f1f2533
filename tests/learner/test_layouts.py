"""The same update in every layout: loss, gradient norm and log-probabilities equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.update import token_logprobs, update
from tests.learner.tiny import advantages, left_behind, recipe, samples, save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.process


def two_updates(
    model: str, sections: dict[str, dict[str, Any]]
) -> tuple[dict[str, float], dict[str, float], np.ndarray]:
    learner = build_learner(recipe(Path(model), **sections))
    data = left_behind(samples())
    first = update(learner, data, advantages(len(data)))
    second = update(learner, data, advantages(len(data)))
    return first, second, np.concatenate(token_logprobs(learner, data))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    return {tied: str(save_model(tmp_path_factory.mktemp("model"), tied)) for tied in (True, False)}


@pytest.fixture(scope="module")
def alone(models: dict[bool, str]) -> dict[bool, Any]:
    return {tied: run_ranks(1, two_updates, model, {})[0] for tied, model in models.items()}


LAYOUTS = {
    "tp2": (2, True, {"parallel": {"tensor": 2}}),
    "tp2 untied": (2, False, {"parallel": {"tensor": 2}}),
    "pp2": (2, True, {"parallel": {"pipeline": 2}}),
    "pp2 untied": (2, False, {"parallel": {"pipeline": 2}}),
    "dp2": (2, True, {}),
    "tp2 pp2": (4, True, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "pp2 vpp2": (2, False, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    "pp2 vpp2 tied, full recompute": (
        2,
        True,
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "learner": {"recompute": "full"}},
    ),
    "tp4 of 2 key/value heads": (4, True, {"parallel": {"tensor": 4}}),
    "pp2 cp2": (4, True, {"parallel": {"pipeline": 2, "context": 2}}),
    "cp2": (2, True, {"parallel": {"context": 2}}),
    "tp2 cp2 untied": (4, False, {"parallel": {"tensor": 2, "context": 2}}),
    "dp2 pp2": (4, True, {"parallel": {"pipeline": 2}}),
    "one micro-batch": (1, True, {"learner": {"micro_batch_tokens": 4096}}),
    "full recompute": (1, True, {"learner": {"recompute": "full"}}),
    "selective recompute": (1, True, {"learner": {"recompute": "selective"}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_is_that_of_one_process(layout: str, models: dict[bool, str], alone: dict[bool, Any]) -> None:
    world, tied, sections = LAYOUTS[layout]
    found = run_ranks(world, two_updates, models[tied], sections)
    first, second, logprobs = alone[tied]
    assert first["vetoed_fraction"] > 0.1, "the veto takes part"
    for rank in found:
        assert rank[0]["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert rank[0]["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
        assert rank[0]["vetoed_fraction"] == first["vetoed_fraction"]
        assert rank[1]["loss"] == pytest.approx(second["loss"], rel=2e-3)  # Adam's first step amplifies rounding
        assert rank[1]["grad_norm"] == pytest.approx(second["grad_norm"], rel=2e-3)
        np.testing.assert_allclose(rank[2], logprobs, atol=2e-3)
        assert rank[0]["packed_efficiency"] > 0.7
