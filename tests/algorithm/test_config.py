"""Presets, what an objective says of itself, surrogates of a user, and impossible settings."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings

from mugrpo_megatron.algorithm import surrogates
from mugrpo_megatron.algorithm.surrogates import surrogate_of
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import ObjectiveSection, load_recipe
from mugrpo_megatron.recipe.objective import PRESETS, SURROGATES, ObjectiveName
from tests.algorithm.batches import Batch, batches, random_batch
from tests.algorithm.test_policy_loss import loss_and_gradient
from tests.checkout import ROOT


def test_every_name_has_a_preset_and_every_surrogate_is_there() -> None:
    assert set(PRESETS) == set(get_args(ObjectiveName))
    assert set(surrogates.SURROGATES) == set(SURROGATES)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_field_in_the_recipe_wins_over_the_preset_and_a_resolved_section_reads_back_as_itself(name: str) -> None:
    preset, changed = ObjectiveSection(name=name), ObjectiveSection(name=name, clip_high=7.0)
    assert changed.clip_high == 7.0
    assert changed.model_copy(update={"clip_high": preset.clip_high}) == preset
    assert ObjectiveSection(**preset.model_dump()) == preset


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("proximal_every=4 name=grpo", "objective.proximal_every` = 4: .*without a proximal policy"),
        ("proximal_every=0", "objective.proximal_every` = 0"),
        ("trigger_ratio=1.5", "objective.trigger_ratio` = 1.5"),
        ("clip_low=1.1", "objective.clip_low` = 1.1"),
        ("name=nonsense", "objective.name` = 'nonsense'"),
        ("clip_hi=2", "objective.clip_hi"),
        ("surrogate=pop", "take one of ppo, cispo"),
        ("surrogate=module:two:three", "take one of ppo, cispo"),
        ("reject=sequence reject_range=[2.0,2.0]", "above its first"),
        ("diagnostics=late_drift", "module:function"),
        ("kl_coef=0.1", "set kl_ref"),
        ("kl_ref=start kl_coef=0.1 kl_penalty=k1", "Input should be 'reward', 'k2'"),
        ("kl_ref=stage kl_coef=0.1 kl_penalty=reward", "is always 0: the policy that sampled is the reference policy"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(overrides: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_recipe(None, [f"objective.{override}" for override in overrides.split()])


def test_mu_grpo_is_the_default() -> None:
    section = ObjectiveSection()
    assert (section.name, section.clip_low, section.clip_high) == ("mu_grpo", 0.0, 5.0)
    assert (section.veto, section.trigger_ratio, section.dual_clip) == ("suffix_non_trigger", 1e-4, None)


@settings(max_examples=25)
@given(batches())
def test_a_users_surrogate_is_bitwise_the_built_in_one(batch: Batch) -> None:
    user = ObjectiveSection(name="grpo", surrogate="tests.algorithm.user_surrogates:again_ppo")
    result, expected = loss_and_gradient(batch, user), loss_and_gradient(batch, ObjectiveSection(name="grpo"))
    assert (result[0], result[2]) == (expected[0], expected[2])
    assert result[1].equal(expected[1])


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file in the current directory, its three lines of recipe, and the figures that they promise."""
    page = Path(ROOT, "docs/own-functions.md").read_text(encoding="utf-8").partition("## Your own loss")[2]
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
