"""float16: a scaled loss with the gradient of the unscaled one, overflows that lower the scale, a scale that stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.optimizer import INITIAL_SCALE, scaler_state, set_scaler_state
from mugrpo_megatron.learner.update import token_logprobs, update
from tests.learner.tiny import advantages, recipe, samples
from tests.ranks import run_ranks

pytestmark = pytest.mark.process
HALF = {"model": {"dtype": "float16"}}


def on_policy(learner: Learner) -> dict[str, float]:
    data = samples()
    logprobs = token_logprobs(learner, data)
    data = [replace(sample, behaviour_logprobs=mine) for sample, mine in zip(data, logprobs, strict=True)]
    return update(learner, data, advantages(24))


def one_update(model: str, sections: dict[str, Any]) -> dict[str, float]:
    return on_policy(build_learner(recipe(Path(model), **sections)))


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"parallel": {"pipeline": 2}})])
def test_the_gradient_is_that_of_the_loss_without_a_scale(
    exact: dict[str, float], model: str, world: int, layout: dict[str, Any]
) -> None:
    for result in run_ranks(world, one_update, model, {**HALF, **layout}):
        assert result["ratio_neg_min"] == result["ratio_neg_max"] == 1.0
        assert (result["overflowed"], result["skipped"], result["loss_scale"]) == (0.0, 0.0, INITIAL_SCALE)
        assert result["grad_norm"] == pytest.approx(exact["grad_norm"], rel=2e-2)


@pytest.fixture(scope="module")
def exact(model: str) -> dict[str, float]:
    return run_ranks(1, one_update, model, {})[0]


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in policy(learner.chunks[0]).parameters()])


def overflowing(model: str, directory: str) -> dict[str, Any]:
    """An update at a scale that overflows, one after it, then a bad gradient at every scale down to the smallest."""
    learner = build_learner(recipe(Path(model), **HALF))
    set_scaler_state(learner.optimizer, {"scale": 2.0**40, "growth_tracker": 7, "hysteresis_tracker": 1})
    before = weights(learner)
    result = {"lost": on_policy(learner), "same": before.equal(weights(learner)), "row": learner.skipped_in_a_row}
    result["scale"] = scaler_state(learner.optimizer)["scale"]
    set_scaler_state(learner.optimizer, {"scale": 64.0, "growth_tracker": 7, "hysteresis_tracker": 1})
    result["taken"] = on_policy(learner)
    result["saved"] = scaler_state(learner.optimizer)
    checkpoint.begin_save(
        learner, Path(directory) / "checkpoint", {"run": "r", "cursor": {"stage": 0, "age": 0, "updates": 0}}
    )()
    on_policy(learner)
    result["after"] = weights(learner).numpy()
    set_scaler_state(learner.optimizer, {"scale": 2.0, "growth_tracker": 0, "hysteresis_tracker": 1})
    bad = advantages(24)
    bad[3] = np.nan
    result["bad"] = [update(learner, samples(), bad) for _ in range(3)]
    result["bad_row"] = learner.skipped_in_a_row
    return result


def resumed(model: str, directory: str) -> tuple[dict[str, float], tuple[int, int], np.ndarray]:
    learner = build_learner(recipe(Path(model), **HALF))
    checkpoint.load(learner, Path(directory) / "checkpoint")
    scaler, done = scaler_state(learner.optimizer), (learner.updates_done, learner.steps_done)
    on_policy(learner)
    return scaler, done, weights(learner).numpy()


def test_an_overflow_lowers_the_scale_and_is_no_bad_gradient(model: str, tmp_path: Path) -> None:
    [result] = run_ranks(1, overflowing, model, str(tmp_path))
    assert (result["lost"]["overflowed"], result["lost"]["skipped"]) == (1.0, 0.0)
    assert result["same"]
    assert result["row"] == 0
    assert result["scale"] == 2.0**39
    assert (result["taken"]["overflowed"], result["taken"]["loss_scale"]) == (0.0, 64.0)
    [(scaler, done, after)] = run_ranks(1, resumed, model, str(tmp_path))
    assert result["saved"] == scaler == {"scale": 64.0, "growth_tracker": 8.0, "hysteresis_tracker": 1.0}
    assert done == (2, 1)
    np.testing.assert_array_equal(after, result["after"])
    assert [(row["overflowed"], row["skipped"]) for row in result["bad"]] == [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]
    assert result["bad_row"] == 2
