"""Softmax over the tokens that a sampler kept: the fused loss against masked logits in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.kernels.fused_loss import fused_policy_loss
from mugrpo_megatron.kernels.head import HeadLayout
from mugrpo_megatron.kernels.linear_logprob import token_logprobs
from mugrpo_megatron.recipe import ObjectiveSection
from tests.kernels.parallel import everyone, own_rows
from tests.kernels.problems import TEMPERATURE, VOCAB, Answer, Problem, distance, gradient, make_problem
from tests.ranks import run_ranks

CONFIGS = {
    "prefix": ObjectiveSection(),
    "response": ObjectiveSection(name="gspo", entropy_coef=0.2),
    "entropy and KL": ObjectiveSection(name="grpo", entropy_coef=0.2, kl_anchor="start", kl_coef=0.3),
}


def kept_of(problem: Problem) -> torch.Tensor:
    """Five tokens a place, the sampled one and up to four others, -1 where two coincide."""
    generator = torch.Generator().manual_seed(3)
    others = torch.randint(VOCAB, (len(problem.targets), 4), generator=generator)
    kept = torch.cat([others, problem.targets[:, None]], 1)
    double = (kept[:, :, None] == kept[:, None, :]).tril(-1).any(2)
    return torch.where(double, -1, kept)


def expected_answer(problem: Problem, kept: torch.Tensor) -> Answer:
    """Everything from all logits, those of other tokens at minus infinity."""
    leaves = problem.leaves()
    inside = torch.zeros(len(kept), VOCAB + 1, dtype=torch.bool).scatter(1, kept % (VOCAB + 1), True)[:, :VOCAB]
    logits = (leaves.hidden.double() @ leaves.weight[:VOCAB].double().T) / TEMPERATURE
    every = logits.masked_fill(~inside, -torch.inf).log_softmax(1)
    logprobs = every.gather(1, leaves.targets[:, None])[:, 0]
    finite = every.masked_fill(~inside, 0.0)
    entropy = -(finite.exp() * finite).masked_fill(~inside, 0.0).sum(1)
    loss, _ = policy_loss(
        logprobs, leaves.behaviour, leaves.advantages, leaves.segments, leaves.config,
        leaves.statistics, leaves.reference, leaves.anchor, entropy,
    )  # fmt: skip
    d_hidden, d_weight = torch.autograd.grad(loss, (leaves.hidden, leaves.weight))
    return Answer(loss.detach(), logprobs.detach(), entropy.detach(), d_hidden, d_weight)


def fused(problem: Problem, kept: torch.Tensor, layout: HeadLayout) -> Answer:
    leaves = problem.leaves()
    found = fused_policy_loss(
        leaves.hidden, leaves.weight, leaves.targets, leaves.behaviour, leaves.advantages, leaves.segments,
        leaves.config, layout, kept=kept, statistics=leaves.statistics, anchor=leaves.anchor,
    )  # fmt: skip
    found.loss.backward()
    return Answer(found.loss.detach(), found.logprobs, found.entropy, gradient(leaves.hidden), gradient(leaves.weight))


def assert_same(found: Answer, expected: Answer) -> None:
    for name in ("loss", "logprobs", "entropy", "d_hidden", "d_weight"):
        assert distance(getattr(found, name), getattr(expected, name)) < 1e-5, name


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_equals_masked_logits(name: str, chunk: int) -> None:
    problem = make_problem(CONFIGS[name])
    kept = kept_of(problem)
    assert_same(fused(problem, kept, HeadLayout(VOCAB, TEMPERATURE, chunk=chunk)), expected_answer(problem, kept))


def test_log_probabilities_alone_are_the_same_to_the_bit() -> None:
    problem = make_problem(CONFIGS["prefix"])
    kept, layout = kept_of(problem), HeadLayout(VOCAB, TEMPERATURE, chunk=7)
    logprobs, entropy = token_logprobs(problem.hidden, problem.weight, problem.targets, layout, kept)
    with_loss = fused(problem, kept, layout)
    assert logprobs.equal(with_loss.logprobs)
    assert entropy.equal(with_loss.entropy)


def test_the_whole_vocabulary_kept_is_no_mask() -> None:
    problem, layout = make_problem(CONFIGS["entropy and KL"]), HeadLayout(VOCAB, TEMPERATURE, chunk=7)
    kept = torch.arange(VOCAB).expand(len(problem.targets), VOCAB)
    leaves = problem.leaves()
    plain = fused_policy_loss(
        leaves.hidden, leaves.weight, leaves.targets, leaves.behaviour, leaves.advantages, leaves.segments,
        leaves.config, layout, anchor=leaves.anchor,
    )  # fmt: skip
    assert fused(problem, kept, layout).logprobs.equal(plain.logprobs)


def on_ranks() -> None:
    """Every rank holds some rows of the weight, one of them padding only."""
    for config in CONFIGS.values():
        problem = make_problem(config)
        kept, rows = kept_of(problem), own_rows()
        expected = expected_answer(problem, kept)
        mine = replace(problem, weight=problem.weight[rows])
        found = fused(mine, kept, HeadLayout(VOCAB, TEMPERATURE, everyone(), 5))
        dist.all_reduce(found.d_hidden)
        assert_same(found, replace(expected, d_weight=expected.d_weight[rows]))


@pytest.mark.process
@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_parallel(world: int) -> None:
    run_ranks(world, on_ranks)
