"""The KL penalty and the teacher's term: mean gradients over all tokens of a small vocabulary, and where they count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.ref_kl import kl_estimate, kl_loss, rewards_less_kl
from mugrpo_megatron.algorithm.segments import LossInputs, make_segments
from mugrpo_megatron.recipe import ObjectiveSection
from tests.algorithm.batches import Batch, batches, configs

WORDS = 7


def draw(seed: int) -> torch.Tensor:
    """Logits of a policy, its behaviour policy and its reference policy."""
    return torch.randn(3, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_gradient(seed: int, estimator: str, weighted: bool, stale: bool) -> torch.Tensor:
    """Mean over every token, as likely as the behaviour policy makes it, of the penalty's gradient in the logits."""
    logits, behaviour, ref = draw(seed)
    logits.requires_grad_()
    logprobs = logits.log_softmax(0)
    behaviour = behaviour.log_softmax(0) if stale else logprobs.detach()
    config = ObjectiveSection(kl_ref="start", kl_coef=1.0)
    penalty = f"{estimator}_weighted" if weighted else estimator  # k1 without weights is none that a recipe may name
    config = config.model_copy(update={"kl_penalty": penalty})
    one_each = make_segments(torch.ones(WORDS, dtype=torch.int64), torch.ones(WORDS, dtype=torch.float64))
    loss = kl_loss(logprobs, ref.log_softmax(0), logprobs - behaviour, one_each, config)
    return torch.autograd.grad((behaviour.exp() * loss).sum(), logits)[0]


def kl_gradient(seed: int, of_ref: bool = False) -> torch.Tensor:
    """Gradient in the policy's logits of KL(pi | ref), or of KL(ref | pi), summed over the vocabulary."""
    logits, _, ref = draw(seed)
    logits.requires_grad_()
    pi, fixed = logits.softmax(0), ref.softmax(0)
    value = (fixed * (fixed / pi).log()).sum() if of_ref else (pi * (pi / fixed).log()).sum()
    return torch.autograd.grad(value, logits)[0]


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_mean_gradients_on_policy(seed: int) -> None:
    """Tang & Munos, arXiv 2506.09477: zero for k1, the KL's for k2, the other direction's for k3."""
    assert mean_gradient(seed, "k1", False, False).abs().max() < 1e-12
    torch.testing.assert_close(mean_gradient(seed, "k2", False, False), kl_gradient(seed))
    torch.testing.assert_close(mean_gradient(seed, "k3", False, False), kl_gradient(seed, of_ref=True))


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(["k1", "k2", "k3"]), st.booleans())
def test_weighted_by_the_ratio_it_is_the_kl_gradient_at_any_staleness(seed: int, estimator: str, stale: bool) -> None:
    torch.testing.assert_close(mean_gradient(seed, estimator, True, stale), kl_gradient(seed))


def test_rewards_lose_the_log_ratio_of_the_whole_response() -> None:
    config = ObjectiveSection(kl_ref="start", kl_coef=0.1, kl_penalty="reward")
    behaviour = [np.array([-1.0, -2.0], np.float32), np.array([], np.float32), np.array([-0.5], np.float32)]
    ref = [np.array([-1.5, -4.0], np.float32), np.array([], np.float32), np.array([-0.25], np.float32)]
    result = rewards_less_kl(np.array([1.0, 0.0, 1.0]), behaviour, ref, config)
    np.testing.assert_allclose(result, [1 - 0.1 * 2.5, 0.0, 1 + 0.1 * 0.25])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@given(st.floats(-300, -1e-3))
def test_a_token_below_the_reference_policy_is_never_pushed_further_down(estimator: str, d: float) -> None:
    logprobs = torch.tensor([d - 1.0], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-1.0]), estimator).sum().backward()
    assert logprobs.grad.item() <= 0


def with_teacher(config: ObjectiveSection, policy: str, coef: float = 1.0) -> ObjectiveSection:
    return config.model_copy(update={"teacher": "t", "teacher_coef": coef, "teacher_policy": policy})


def loss_and_gradient(batch: Batch, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    logprobs = batch.leaf()
    loss, metrics = policy_loss(logprobs, inputs)
    return loss.detach(), torch.autograd.grad(loss, logprobs, allow_unused=True)[0], metrics


@given(batches(), configs, st.sampled_from(["behaviour", "current"]))
def test_a_teacher_like_the_policy_changes_nothing_bitwise(batch: Batch, config: ObjectiveSection, policy: str) -> None:
    inputs, logprobs = batch.inputs(config), batch.leaf().detach()
    teacher = inputs.behaviour if policy == "behaviour" else logprobs
    loss, gradient, metrics = loss_and_gradient(batch, inputs)
    taught = loss_and_gradient(batch, replace(inputs, config=with_teacher(config, policy), teacher=teacher))
    assert torch.equal(taught[0], loss)
    assert (gradient is None) == (taught[1] is None)
    assert gradient is None or torch.equal(taught[1], gradient)
    kl = taught[2].pop("kl_teacher", None)
    assert {**taught[2]} == pytest.approx(metrics, nan_ok=True, rel=0)
    if policy == "current" and len(logprobs):
        assert kl == 0.0


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.booleans())
def test_the_mean_gradient_is_that_of_the_reverse_kl_at_any_staleness(seed: int, stale: bool) -> None:
    """Mean over every token of a small vocabulary, as likely as the behaviour policy makes it."""
    logits, behaviour, teacher = torch.randn(
        3, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    teacher = teacher.log_softmax(0)

    def gradient_of(taught: bool) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        logprobs = leaf.log_softmax(0)
        if not taught:
            return torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), leaf)[0]
        sampled = behaviour.log_softmax(0) if stale else logprobs.detach()
        segments = make_segments(torch.ones(WORDS, dtype=torch.int64), sampled.exp())
        config = with_teacher(ObjectiveSection(clip_high=1e6, veto="none"), "current")
        rewards = torch.zeros(WORDS, dtype=torch.float64)
        loss, _ = policy_loss(logprobs, LossInputs(config, sampled, rewards, segments, teacher=teacher))
        return torch.autograd.grad(loss, leaf)[0]

    torch.testing.assert_close(gradient_of(taught=True), gradient_of(taught=False))


def test_the_two_policies_differ_where_the_stage_is_stale() -> None:
    """A = 1, log ratios +-0.5, a teacher that gives every token what the behaviour policy gave it."""
    behaviour = torch.full((2,), -1.0, dtype=torch.float64)
    segments = make_segments(torch.tensor([2]), torch.ones(1, dtype=torch.float64))
    losses = {}
    for policy in ("behaviour", "current"):
        logprobs = torch.tensor([-0.5, -1.5], dtype=torch.float64)
        config = with_teacher(ObjectiveSection(clip_high=1e6, veto="none"), policy, coef=2.0)
        inputs = LossInputs(config, behaviour, torch.ones(1).double(), segments, teacher=behaviour)
        losses[policy] = float(policy_loss(logprobs, inputs)[0])
    up, down = torch.tensor([0.5, -0.5]).double().exp().tolist()
    assert losses["behaviour"] == pytest.approx(-(up + down))
    assert losses["current"] == pytest.approx(-(up * (1 - 2 * 0.5) + down * (1 + 2 * 0.5)))


def test_the_veto_goes_by_the_response_and_not_by_the_token() -> None:
    """A teacher that dislikes a token of a good response makes its advantage negative, and no trigger of it."""
    behaviour = torch.zeros(2, dtype=torch.float64)
    logprobs = torch.full((2,), -20.0, dtype=torch.float64)
    segments = make_segments(torch.tensor([2]), torch.ones(1, dtype=torch.float64))
    config = with_teacher(ObjectiveSection(veto="suffix"), "behaviour")
    teacher = torch.full((2,), -5.0, dtype=torch.float64)
    inputs = LossInputs(config, behaviour, torch.ones(1).double(), segments, teacher=teacher)
    _, metrics = policy_loss(logprobs, inputs)
    assert metrics["vetoed_fraction"] == 0.0
