"""The fused loss, and log-probabilities alone, against all logits: any objective and chunk size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.kernels.head import token_logprobs
from mugrpo_megatron.recipe import ObjectiveSection
from tests.kernels.problems import (
    OBJECTIVES,
    SUPPORT_OBJECTIVES,
    VOCAB,
    Problem,
    assert_same,
    distance,
    fused,
    layout_of,
    make_problem,
    materialised,
    materialised_logprobs,
    run,
    support_of_problem,
    tolerance_of,
)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(OBJECTIVES)),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 25), max_size=4),
)
def test_equals_the_materialised_loss(name: str, chunk: int, seed: int, lengths: list[int]) -> None:
    problem = make_problem(OBJECTIVES[name], seed=seed, lengths=(3, 5, *lengths))
    assert_same(fused(problem, layout_of(chunk)), materialised(problem), tolerance_of(problem.config))


@pytest.mark.parametrize("name", ["mu_grpo", "gspo"])
def test_main_grad_takes_the_weight_gradient_and_autograd_none(name: str) -> None:
    problem = make_problem(OBJECTIVES[name])
    expected = materialised(problem)
    leaves, total = problem.leaves(), torch.full_like(problem.weight, 3.0, dtype=torch.float32)
    result = run(leaves, layout_of(10), main_grad=total, grad_scale=4.0)
    (result.loss * 4).backward()
    assert distance(total - 3, 4 * expected.d_weight) < 1e-5
    assert distance(leaves.hidden.grad, 4 * expected.d_hidden) < 1e-6
    assert leaves.weight.grad is None


def test_another_gradient_than_was_promised_is_an_error() -> None:
    leaves = make_problem(OBJECTIVES["mu_grpo"]).leaves()
    result = run(leaves, layout_of(10), main_grad=torch.zeros_like(leaves.weight), grad_scale=2.0)
    with pytest.raises(RuntimeError, match="nonzero"):
        result.loss.backward()


@pytest.mark.parametrize("name", ["mu_grpo", "gspo"])
def test_the_gradient_scales_with_what_backward_hands_in(name: str) -> None:
    problem = make_problem(OBJECTIVES[name])
    expected, leaves = materialised(problem), problem.leaves()
    (run(leaves, layout_of(10)).loss * -0.5).backward()
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
        return torch.autograd.grad(run(leaves, layout_of(10)).loss, leaves.weight)[0]

    leaves = problem.leaves()
    leaves.hidden = leaves.hidden.detach() + leaves.weight[leaves.targets].detach()
    d_hidden = materialised(leaves).d_hidden
    embedding = torch.zeros_like(leaves.weight).index_add(0, leaves.targets, d_hidden)
    assert distance(gradient(head_only=False) - gradient(head_only=True), embedding) < 1e-5


def test_a_frozen_weight_or_no_gradient_at_all() -> None:
    problem = make_problem(OBJECTIVES["mu_grpo"])
    expected, leaves = materialised(problem), problem.leaves()
    leaves.weight.requires_grad_(False)
    run(leaves, layout_of(10)).loss.backward()
    assert distance(leaves.hidden.grad, expected.d_hidden) < 1e-6
    with torch.no_grad():
        result = run(problem.leaves(), layout_of(10))
    assert not result.loss.requires_grad
    assert distance(result.loss, expected.loss) < 1e-6


@pytest.mark.parametrize("name", ["mu_grpo", "gspo", "m2po", "gspo, entropy"])
def test_no_tokens(name: str) -> None:
    problem = make_problem(OBJECTIVES[name], lengths=(0, 0, 0))
    result = fused(problem, layout_of(10))
    assert result.loss == 0
    assert result.d_hidden.shape == problem.hidden.shape
    assert not result.d_weight.any()


@pytest.mark.parametrize("name", ["mu_grpo", *(name for name in OBJECTIVES if name.startswith("veto="))])
def test_the_problems_hold_triggers(name: str) -> None:
    """What is compared is compared where the veto acts."""
    problem = make_problem(OBJECTIVES[name])
    logprobs = materialised_logprobs(problem)[0]
    _, metrics = policy_loss(logprobs, problem.inputs)
    assert metrics["vetoed_fraction"] > 0.1


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name.startswith("weights by")])
def test_the_problems_lose_weight(name: str) -> None:
    problem = make_problem(OBJECTIVES[name])
    _, metrics = policy_loss(materialised_logprobs(problem)[0], problem.inputs)
    assert 0.1 < metrics["prefix_weight_lost"] < 0.9
    assert problem.config.dependence == "prefix"


@pytest.mark.parametrize("name", sorted(SUPPORT_OBJECTIVES))
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_softmax_over_the_tokens_that_a_sampler_kept_equals_masked_logits(name: str, chunk: int) -> None:
    problem = make_problem(SUPPORT_OBJECTIVES[name])
    support_ids, layout = support_of_problem(problem), layout_of(chunk)
    result = fused(problem, layout, support_ids=support_ids)
    assert_same(result, materialised(problem, support_ids), 1e-5)
    logprobs, entropy = token_logprobs(problem.hidden, problem.weight, problem.targets, layout, support_ids)
    assert logprobs.equal(result.logprobs)
    assert entropy.equal(result.entropy)


def chunked(problem: Problem, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    return token_logprobs(problem.hidden, problem.weight, problem.targets, layout_of(chunk))


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 30), max_size=4))
def test_equals_log_softmax(chunk: int, seed: int, lengths: list[int]) -> None:
    problem = make_problem(ObjectiveSection(), seed=seed, lengths=(1, 1, *lengths))
    ours, theirs = problem.leaves(), problem.leaves()
    logprobs, entropy = chunked(ours, chunk)
    expected, expected_entropy = materialised_logprobs(theirs)
    assert distance(logprobs.detach(), expected.detach()) < 1e-6
    assert distance(entropy, expected_entropy.detach()) < 1e-6
    d_logprobs = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(seed))
    logprobs.backward(d_logprobs)
    expected.backward(d_logprobs)
    assert distance(ours.hidden.grad, theirs.hidden.grad) < 1e-6
    assert distance(ours.weight.grad, theirs.weight.grad) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_added_up_in_float32(dtype: torch.dtype) -> None:
    problem = make_problem(ObjectiveSection(), dtype=dtype)
    ours, theirs = problem.leaves(), problem.leaves()
    logprobs, _ = chunked(ours, 7)
    expected, _ = materialised_logprobs(theirs)
    assert distance(logprobs.detach(), expected.detach()) < 1e-6
    logprobs.sum().backward()
    expected.sum().backward()
    assert ours.hidden.grad.dtype == ours.weight.grad.dtype == dtype
    assert distance(ours.hidden.grad, theirs.hidden.grad) < 1e-2
    assert distance(ours.weight.grad, theirs.weight.grad) < 1e-2


def test_padding_rows_take_no_part() -> None:
    problem = make_problem(ObjectiveSection())
    before, _ = chunked(problem, 10)
    problem.weight[VOCAB:] = 1e4
    leaves = problem.leaves()
    after, _ = chunked(leaves, 10)
    assert after.equal(before)
    after.sum().backward()
    assert not leaves.weight.grad[VOCAB:].any()


def test_logits_far_apart_are_finite() -> None:
    problem = make_problem(ObjectiveSection())
    problem.hidden *= 1e3
    leaves = problem.leaves()
    logprobs, entropy = chunked(leaves, 10)
    logprobs.sum().backward()
    for result in (logprobs, entropy, leaves.hidden.grad, leaves.weight.grad):
        assert result.isfinite().all()
