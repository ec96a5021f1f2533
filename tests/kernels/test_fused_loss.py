"""The fused loss against the loss over all logits: every objective, every chunk size, every place for the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.kernels.fused_loss import FusedLoss, fused_policy_loss
from mugrpo_megatron.kernels.head import HeadLayout
from mugrpo_megatron.recipe import ObjectiveSection
from tests.kernels.problems import (
    OBJECTIVES,
    TEMPERATURE,
    VOCAB,
    Answer,
    Problem,
    distance,
    loss_error,
    make_problem,
    materialised,
    materialised_scores,
    tolerance_of,
)


def run(problem: Problem, chunk: int, **options: Any) -> FusedLoss:
    return fused_policy_loss(
        problem.hidden,
        problem.weight,
        problem.targets,
        problem.behaviour,
        problem.advantages,
        problem.segments,
        problem.config,
        HeadLayout(VOCAB, TEMPERATURE, chunk=chunk),
        statistics=problem.statistics,
        reference=problem.reference,
        anchor=problem.anchor,
        **options,
    )


def fused(problem: Problem, chunk: int, **options: Any) -> Answer:
    problem = problem.leaves()
    found = run(problem, chunk, **options)
    d_hidden, d_weight = torch.autograd.grad(found.loss, (problem.hidden, problem.weight))
    return Answer(found.loss.detach(), found.logprobs, found.entropy, d_hidden, d_weight)


def assert_same(found: Answer, expected: Answer, tolerance: float) -> None:
    assert loss_error(found.loss, expected.loss) <= tolerance
    for name in ("logprobs", "entropy", "d_hidden", "d_weight"):
        assert distance(getattr(found, name), getattr(expected, name)) <= tolerance, name


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(OBJECTIVES)),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 25), max_size=4),
)
def test_equals_the_materialised_loss(name: str, chunk: int, seed: int, lengths: list[int]) -> None:
    problem = make_problem(OBJECTIVES[name], seed=seed, lengths=(3, 5, *lengths))
    assert_same(fused(problem, chunk), materialised(problem), tolerance_of(problem.config))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_chunk_size_gives_the_same(name: str) -> None:
    problem = make_problem(OBJECTIVES[name])
    expected = fused(problem, 1000)
    for chunk in range(1, len(problem.targets) + 1):
        assert_same(fused(problem, chunk), expected, tolerance_of(problem.config))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_bfloat16(name: str) -> None:
    problem = make_problem(OBJECTIVES[name], dtype=torch.bfloat16)
    found = fused(problem, 16)
    assert found.d_hidden.dtype == found.d_weight.dtype == torch.bfloat16
    assert_same(found, materialised(problem), 1e-2)


@pytest.mark.parametrize("name", ["mu_grpo", "gspo"])
def test_main_grad_takes_the_weight_gradient_and_autograd_none(name: str) -> None:
    problem = make_problem(OBJECTIVES[name])
    expected = materialised(problem)
    leaves, total = problem.leaves(), torch.full_like(problem.weight, 3.0, dtype=torch.float32)
    found = run(leaves, 10, main_grad=total, grad_scale=4.0)
    (found.loss * 4).backward()
    assert distance(total - 3, 4 * expected.d_weight) < 1e-5
    assert distance(leaves.hidden.grad, 4 * expected.d_hidden) < 1e-6
    assert leaves.weight.grad is None


def test_another_gradient_than_was_promised_is_an_error() -> None:
    leaves = make_problem(OBJECTIVES["mu_grpo"]).leaves()
    found = run(leaves, 10, main_grad=torch.zeros_like(leaves.weight), grad_scale=2.0)
    with pytest.raises(RuntimeError, match="nonzero"):
        found.loss.backward()


@pytest.mark.parametrize("name", ["mu_grpo", "gspo"])
def test_the_gradient_scales_with_what_backward_hands_in(name: str) -> None:
    problem = make_problem(OBJECTIVES[name])
    expected, leaves = materialised(problem), problem.leaves()
    (run(leaves, 10).loss * -0.5).backward()
    assert distance(leaves.hidden.grad, -0.5 * expected.d_hidden) < 1e-6
    assert distance(leaves.weight.grad, -0.5 * expected.d_weight) < 1e-6


@pytest.mark.parametrize("name", ["mu_grpo", "gspo"])
def test_tied_weight_adds_both_gradients(name: str) -> None:
    """The output weight is the embedding too: its gradient is the sum of both uses."""
    problem = make_problem(OBJECTIVES[name])

    def gradient(head_only: bool) -> torch.Tensor:
        leaves = problem.leaves()
        embedded = leaves.weight[leaves.targets] if not head_only else leaves.weight.detach()[leaves.targets]
        leaves.hidden = leaves.hidden.detach() + embedded
        return torch.autograd.grad(run(leaves, 10).loss, leaves.weight)[0]

    leaves = problem.leaves()
    leaves.hidden = leaves.hidden.detach() + leaves.weight[leaves.targets].detach()
    d_hidden = materialised(leaves).d_hidden
    embedding = torch.zeros_like(leaves.weight).index_add(0, leaves.targets, d_hidden)
    assert distance(gradient(head_only=False) - gradient(head_only=True), embedding) < 1e-5


def test_a_frozen_weight_or_no_gradient_at_all() -> None:
    problem = make_problem(OBJECTIVES["mu_grpo"])
    expected, leaves = materialised(problem), problem.leaves()
    leaves.weight.requires_grad_(False)
    run(leaves, 10).loss.backward()
    assert distance(leaves.hidden.grad, expected.d_hidden) < 1e-6
    with torch.no_grad():
        found = run(problem.leaves(), 10)
    assert not found.loss.requires_grad
    assert distance(found.loss, expected.loss) < 1e-6


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_no_tokens(name: str) -> None:
    problem = make_problem(OBJECTIVES[name], lengths=(0, 0, 0))
    found = fused(problem, 10)
    assert found.loss == 0
    assert found.d_hidden.shape == problem.hidden.shape
    assert not found.d_weight.any()


def test_missing_statistics_are_an_error() -> None:
    problem = make_problem(OBJECTIVES["m2po"])
    problem.statistics = None
    with pytest.raises(ValueError, match="m2po needs update_statistics"):
        run(problem, 10)


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("mu_grpo", 25),
        ("veto=trigger", 3 + 2),
        ("veto=suffix", 16 + 12),
        ("veto=suffix_non_trigger", 14 + 11),
        ("veto=response", 20 + 13),
    ],
)
def test_the_problems_hold_triggers_of_the_default_threshold(name: str, dropped: int) -> None:
    """What is compared elsewhere is compared where the veto acts, and where its scopes differ."""
    problem = make_problem(OBJECTIVES[name])
    logprobs = materialised_scores(problem)[0]
    _, metrics = policy_loss(logprobs, problem.behaviour, problem.advantages, problem.segments, problem.config)
    assert problem.config.trigger_ratio == 1e-4
    assert metrics["vetoed_fraction"] == pytest.approx(dropped / len(problem.targets))


def test_a_veto_reaches_into_the_chunks_that_follow() -> None:
    """One trigger early in a long negative response: the tokens after it, chunks away, get no gradient."""
    problem = make_problem(ObjectiveSection(veto="suffix"), lengths=(2, 40))
    problem.advantages = torch.tensor([1.0, -1.0])
    problem.behaviour = materialised(problem).logprobs.float()
    problem.behaviour[5] += 12.0
    for chunk in (1, 3, 4, 42):
        d_hidden = fused(problem, chunk).d_hidden
        assert d_hidden[:6].any(1).all()
        assert not d_hidden[6:].any()
