"""Surrogates one at a time: the user's own, and what the others promise in words."""

from __future__ import annotations

import math
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mugrpo_megatron.algorithm import surrogates
from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.surrogates import surrogate_of
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.objective import SURROGATES
from tests.algorithm.batches import Batch, batches, random_batch
from tests.checkout import ROOT


def loss_and_gradient(batch: Batch, config: ObjectiveSection) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    logprobs, behaviour, advantages = batch.tensors()
    segments, reference = batch.segments(config), batch.reference_for(config)
    loss, metrics = policy_loss(logprobs, behaviour, advantages, segments, config, reference=reference)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics


def test_every_surrogate_that_a_recipe_may_name_is_there() -> None:
    assert set(surrogates.SURROGATES) == set(SURROGATES)


@settings(max_examples=50, deadline=None)
@given(batches())
def test_a_surrogate_of_ones_own_is_bitwise_the_same_one_of_ours(batch: Batch) -> None:
    own = ObjectiveSection(name="grpo", surrogate="tests.algorithm.own:again_ppo")
    found, expected = loss_and_gradient(batch, own), loss_and_gradient(batch, ObjectiveSection(name="grpo"))
    assert found[0] == expected[0]
    assert found[1].equal(expected[1])
    assert found[2] == expected[2]


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
    logprobs, behaviour, advantages = batch.tensors()
    segments = batch.segments(config)
    weight = (-(logprobs.exp() - behaviour.exp()).abs() / 0.1).exp() * (logprobs - behaviour).exp()
    expected = -(weight * advantages[segments.ids] * segments.weights[segments.ids]).detach()
    torch.testing.assert_close(gradient, expected)
    assert loss.item() == pytest.approx((expected * logprobs).sum().item())


@pytest.mark.parametrize(
    ("surrogate", "words"),
    [
        ("tests.algorithm.own:absent", "absent"),
        ("tests.algorithm.own:NOT_A_FUNCTION", "not a function"),
        ("no_such_module_anywhere:loss", "No module named"),
    ],
)
def test_one_that_cannot_be_loaded_is_named(surrogate: str, words: str) -> None:
    config = ObjectiveSection(surrogate=surrogate)
    with pytest.raises(UserError, match=words):
        surrogate_of(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"surrogate": "pop"}, "there are ppo, cispo"),
        ({"surrogate": "module:two:three"}, "there are ppo, cispo"),
        ({"reject": "sequence", "reject_range": (2.0, 2.0)}, "above its first"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ObjectiveSection(**fields)


def test_decoupled_ppo_is_ppo_on_the_proximal_policy_times_a_constant() -> None:
    """AReaL's form: sg(pi_prox / beta) min(u A, clip(u) A) with u = pi / pi_prox."""
    config = ObjectiveSection(name="decoupled_ppo")
    batch = random_batch(4, [6, 3, 9], spread=0.8)
    logprobs, behaviour, advantages = batch.tensors()
    segments, proximal = batch.segments(config), batch.reference_for(config)
    assert proximal is not None
    loss, _ = policy_loss(logprobs, behaviour, advantages, segments, config, reference=proximal)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    a = advantages[segments.ids]
    u = (logprobs - proximal).exp()
    gain = (proximal - behaviour).exp() * torch.minimum(u * a, u.clamp(0.8, 1.2) * a)
    expected = -(gain * segments.weights[segments.ids]).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logprobs)[0], rtol=1e-12, atol=1e-15)


@given(st.floats(-12, -1e-6), st.floats(-12, -1e-6), st.sampled_from(["dppo", "dppo_kl"]), st.sampled_from([-1.0, 1.0]))
def test_dppo_drops_a_token_only_where_it_is_far_and_leads_away(
    now: float, before: float, name: str, advantage: float
) -> None:
    config, limit = ObjectiveSection(name=name), {"dppo": 0.15, "dppo_kl": 0.05}[name]
    batch = Batch([[now]], [[before]], [advantage], [[now]])
    _, gradient, metrics = loss_and_gradient(batch, config)
    p, m = math.exp(now), math.exp(before)
    distance = abs(p - m) if name == "dppo" else m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p))
    if abs(distance - limit) > 1e-6 and p != m:
        dropped = distance > limit and (p > m) == (advantage > 0)
        assert (gradient == 0).item() is dropped
        assert metrics["clipped_fraction"] == float(dropped)


@given(st.floats(-3, 3), st.sampled_from([-1.0, 1.0]))
def test_soft_weights_are_largest_near_the_behaviour_policy(log_ratio: float, advantage: float) -> None:
    """SAPO's and VESPO's gradients at a ratio of 1 are those of REINFORCE and vanish far away on the side they damp."""
    batch = Batch([[-4.0]], [[-4.0 - log_ratio]], [advantage], [[-4.0]])
    sapo = loss_and_gradient(batch, ObjectiveSection(name="sapo"))[1].abs().item()
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (math.exp(log_ratio) - 1)))
    assert sapo == pytest.approx(4 * gate * (1 - gate) * math.exp(log_ratio), rel=1e-9)
    vespo = loss_and_gradient(batch, ObjectiveSection(name="vespo"))[1].abs().item()
    k, decay = (2, 3) if advantage > 0 else (3, 2)
    assert vespo == pytest.approx(math.exp(k * log_ratio + decay * (1 - math.exp(log_ratio))), rel=1e-9)
    assert vespo <= (k / decay) ** k * math.exp(decay - k) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("level", "kept"), [("sequence", [False, True, False]), ("sequence_mean", [True, True, False])]
)
def test_rejection_looks_at_both_signs_and_both_sides(level: str, kept: list[bool]) -> None:
    """Mean log-ratios 0.1, 0.02 and -0.5 over eight tokens; bounds [0.9, 1.2]."""
    means = [0.1, 0.02, -0.5]
    batch = random_batch(0, [8, 8, 8], spread=0.0)
    batch.behaviour = [[x - mean for x in row] for row, mean in zip(batch.logprobs, means, strict=True)]
    for sign in (1.0, -1.0):
        batch.advantages = [sign] * 3
        config = ObjectiveSection(name="grpo", reject=level, reject_range=(0.9, 1.2))
        gradient = loss_and_gradient(batch, config)[1]
        assert [bool(part.any()) for part in gradient.split(8)] == kept
