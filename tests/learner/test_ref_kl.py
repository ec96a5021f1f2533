"""Another policy's weights in the learner for a while: its log-probabilities, and everything back bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.learner import Learner, build_learner, swapped_weights
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.optimizer import torch_optimizers
from mugrpo_megatron.learner.update import token_logprobs, update
from tests.learner.tiny import advantages, recipe, samples
from tests.ranks import run_ranks

pytestmark = pytest.mark.process
PENALTY = {"name": "grpo", "kl_ref": "start", "kl_coef": 2.0}


def state(learner: Learner) -> list[torch.Tensor]:
    """Copies of this rank's weights and of all that the optimizer keeps of them."""
    result = [p.detach().clone() for chunk in learner.chunks for p in policy(chunk).parameters()]
    for inner in torch_optimizers(learner.optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                result += [parameter.detach().clone(), *(v.clone() for v in inner.state[parameter].values())]
    return result


def there_and_back(model: str, sections: dict[str, Any]) -> dict[str, Any]:
    """An update, a pass with the first weights, an update; and the same without that pass."""
    learner = build_learner(recipe(Path(model), objective=PENALTY, **sections))
    first = token_logprobs(learner, samples())
    with_ref = [replace(s, ref_logprobs=logprobs) for s, logprobs in zip(samples(), first, strict=True)]
    penalised = [update(learner, with_ref, advantages(24))]
    before, moved = state(learner), token_logprobs(learner, samples())
    with swapped_weights(learner, Path(model)):
        again = token_logprobs(learner, samples())
    after = state(learner)
    penalised.append(update(learner, with_ref, advantages(24)))
    with pytest.raises(UserError, match="only safetensors"), swapped_weights(learner, Path(model) / "none"):
        pass
    return {
        "same": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and len(before) == len(after),
        "ref": bool(np.array_equal(np.concatenate(again), np.concatenate(first))),
        "moved": float(np.abs(np.concatenate(moved) - np.concatenate(first)).max()),
        "updates": penalised,
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "bfloat16": (1, {"model": {"dtype": "bfloat16"}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
}


@pytest.fixture(scope="module")
def alone(model: str) -> dict[str, Any]:
    return run_ranks(1, there_and_back, model, {})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_learner_comes_back_bit_by_bit(layout: str, model: str, alone: dict[str, Any]) -> None:
    """And the first update has no KL: the reference policy's log-probabilities are bitwise the learner's own."""
    world, sections = LAYOUTS[layout]
    for result in [alone] if layout == "alone" else run_ranks(world, there_and_back, model, sections):
        assert result["same"]
        assert result["ref"]
        assert result["moved"] > 1e-4
        first, second = result["updates"]
        assert first["kl_ref"] == first["kl_ref_k1"] == 0.0
        assert second["kl_ref"] > 0
        if layout != "bfloat16":
            assert second["kl_ref"] == pytest.approx(alone["updates"][1]["kl_ref"], rel=2e-2)
            assert second["loss"] == pytest.approx(alone["updates"][1]["loss"], rel=2e-3)
