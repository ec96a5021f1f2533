"""A user's surrogate, and impossible settings of the objective."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from pydantic import ValidationError

from mugrpo_megatron.algorithm import surrogates
from mugrpo_megatron.algorithm.surrogates import surrogate_of
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.objective import SURROGATES
from tests.algorithm.batches import Batch, batches, random_batch
from tests.algorithm.test_policy_loss import loss_and_gradient
from tests.checkout import ROOT


def test_every_surrogate_that_a_recipe_may_name_is_there() -> None:
    assert set(surrogates.SURROGATES) == set(SURROGATES)


@settings(max_examples=25)
@given(batches())
def test_a_users_surrogate_is_bitwise_the_built_in_one(batch: Batch) -> None:
    user = ObjectiveSection(name="grpo", surrogate="tests.algorithm.user_surrogates:again_ppo")
    result, expected = loss_and_gradient(batch, user), loss_and_gradient(batch, ObjectiveSection(name="grpo"))
    assert (result[0], result[2]) == (expected[0], expected[2])
    assert result[1].equal(expected[1])


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file in the current directory, its three lines of recipe, and the figures that they promise."""
    page = Path(ROOT, "docs/your-problem.md").read_text(encoding="utf-8").partition("## Your own loss")[2]
    (tmp_path / "my_losses.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    fields = tomllib.loads(page.split("```toml\n")[1].split("```")[0])["objective"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    batch = random_batch(1, [5, 0, 8])
    config = ObjectiveSection(**fields)
    loss, gradient, _ = loss_and_gradient(batch, config)
    logprobs, inputs = batch.leaf(), batch.inputs(config)
    behaviour, segments = inputs.behaviour, inputs.segments
    weight = (-(logprobs.exp() - behaviour.exp()).abs() / 0.1).exp() * (logprobs - behaviour).exp()
    expected = -(weight * inputs.advantages[segments.ids] * segments.weights[segments.ids]).detach()
    torch.testing.assert_close(gradient, expected)
    assert loss == pytest.approx((expected * logprobs).sum().item())


@pytest.mark.parametrize(
    ("surrogate", "words"),
    [
        ("tests.algorithm.user_surrogates:absent", "absent"),
        ("tests.algorithm.user_surrogates:NOT_A_FUNCTION", "not a function"),
        ("no_such_module_anywhere:loss", "No module named"),
    ],
)
def test_a_surrogate_that_cannot_be_loaded_is_named(surrogate: str, words: str) -> None:
    config = ObjectiveSection(surrogate=surrogate)
    with pytest.raises(UserError, match=words):
        surrogate_of(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"surrogate": "pop"}, "take one of ppo, cispo"),
        ({"surrogate": "module:two:three"}, "take one of ppo, cispo"),
        ({"reject": "sequence", "reject_range": (2.0, 2.0)}, "above its first"),
        ({"diagnostics": "late_drift"}, "module:function"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ObjectiveSection(**fields)
