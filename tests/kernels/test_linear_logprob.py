"""Chunked log-probabilities against log_softmax over all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.kernels.head import HeadLayout
from mugrpo_megatron.kernels.linear_logprob import token_logprobs
from mugrpo_megatron.recipe import ObjectiveSection
from tests.kernels.problems import (
    PADDED,
    TEMPERATURE,
    VOCAB,
    WIDTH,
    Problem,
    distance,
    make_problem,
    materialised_scores,
)


def chunked(problem: Problem, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    return token_logprobs(problem.hidden, problem.weight, problem.targets, HeadLayout(VOCAB, TEMPERATURE, chunk=chunk))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 30), max_size=4))
def test_equals_log_softmax(chunk: int, seed: int, lengths: list[int]) -> None:
    problem = make_problem(ObjectiveSection(), seed=seed, lengths=(1, 1, *lengths))
    ours, theirs = problem.leaves(), problem.leaves()
    logprobs, entropy = chunked(ours, chunk)
    expected, expected_entropy = materialised_scores(theirs)
    assert distance(logprobs.detach(), expected.detach()) < 1e-6
    assert distance(entropy, expected_entropy.detach()) < 1e-6
    slope = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(seed))
    logprobs.backward(slope)
    expected.backward(slope)
    assert distance(ours.hidden.grad, theirs.hidden.grad) < 1e-6
    assert distance(ours.weight.grad, theirs.weight.grad) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_added_up_in_float32(dtype: torch.dtype) -> None:
    problem = make_problem(ObjectiveSection(), dtype=dtype)
    ours, theirs = problem.leaves(), problem.leaves()
    logprobs, _ = chunked(ours, 7)
    expected, _ = materialised_scores(theirs)
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


def test_no_tokens() -> None:
    hidden, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(PADDED, WIDTH, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), HeadLayout(VOCAB))
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, WIDTH)
    assert not weight.grad.any()


def test_a_frozen_weight_gets_no_gradient() -> None:
    problem = make_problem(ObjectiveSection()).leaves()
    problem.weight.requires_grad_(False)
    chunked(problem, 10)[0].sum().backward()
    assert problem.weight.grad is None
    assert problem.hidden.grad.any()


def test_logits_far_apart_are_finite() -> None:
    problem = make_problem(ObjectiveSection())
    problem.hidden *= 1e3
    leaves = problem.leaves()
    logprobs, entropy = chunked(leaves, 10)
    logprobs.sum().backward()
    for found in (logprobs, entropy, leaves.hidden.grad, leaves.weight.grad):
        assert found.isfinite().all()
