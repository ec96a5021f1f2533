"""The KL penalty: what its gradient is on average, over every token of a small vocabulary, and where it counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.ref_kl import kl_estimate, kl_loss, rewards_less_kl
from mugrpo_megatron.algorithm.segments import make_segments
from mugrpo_megatron.recipe import ObjectiveSection

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
