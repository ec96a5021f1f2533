"""Small output layers with everything an objective needs, and the loss with all logits at once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mugrpo_megatron.algorithm.masks import response_weights
from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.segments import LossInputs, make_segments, with_turns
from mugrpo_megatron.algorithm.statistics import UpdateStatistics, update_statistics
from mugrpo_megatron.kernels.fused_loss import FusedLoss, fused_policy_loss
from mugrpo_megatron.kernels.head import HeadLayout
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.objective import PRESETS

TEMPERATURE = 0.7
VOCAB = 35
PADDED = 48
"""Rows of the weight; of four equal shares the last holds padding only."""
WIDTH = 12

STALE = ((3, -12.0), (4, -9.6), (5, -8.8), (9, -12.0), (11, 2.0))
"""(position, log-ratio) in the last response but one. The veto's threshold of 1e-4 is -9.2 nats: tokens lie on either
side of it, far enough that rounding decides about no token."""
STALE_START = ((0, -12.0), (1, -12.0))
"""The same in the last response, of which a suffix leaves the first token alone."""

OBJECTIVES: dict[str, ObjectiveSection] = {name: ObjectiveSection(name=name) for name in sorted(PRESETS)}
OBJECTIVES |= {
    f"veto={scope}": ObjectiveSection(veto=scope) for scope in ("trigger", "suffix_non_trigger", "suffix", "response")
}
OBJECTIVES |= {
    f"veto={scope} of a turn": ObjectiveSection(veto=scope, veto_reach="turn")
    for scope in ("suffix_non_trigger", "suffix", "response")
}
OBJECTIVES |= {
    f"weights by {veto}{' of a turn' * (reach == 'turn')}": ObjectiveSection(veto=veto, veto_reach=reach)
    for veto in ("prefix", "prefix_min")
    for reach in ("response", "turn")
}
OBJECTIVES["weights by prefix, both signs"] = ObjectiveSection(veto="prefix", prefix_signs="both")
OBJECTIVES |= {
    f"{name}, proximal": ObjectiveSection(name=name, clip_centre="proximal_shifted", proximal_every=4)
    for name in ("off_policy_grpo", "mu_grpo", "gspo")
}
OBJECTIVES |= {
    f"{name}, {penalty} to a reference policy": ObjectiveSection(
        name=name, kl_ref="start", kl_coef=0.3, kl_penalty=penalty
    )
    for name, penalty in (("mu_grpo", "k2"), ("grpo", "k3"), ("gspo", "k1_weighted"), ("mu_grpo", "k3_weighted"))
}
OBJECTIVES |= {
    f"{name}, entropy{' and KL' * bool(kl)}": ObjectiveSection(name=name, entropy_coef=0.2, **kl)
    for name, kl in (
        ("mu_grpo", {}),
        ("grpo", {"kl_ref": "start", "kl_coef": 0.3}),
        ("gspo", {}),
    )
}
OBJECTIVES |= {
    f"{name}, teacher against the {policy} policy": ObjectiveSection(
        name=name, teacher="t", teacher_coef=0.7, teacher_policy=policy
    )
    for name, policy in (
        ("mu_grpo", "behaviour"),
        ("mu_grpo", "current"),
        ("gspo", "behaviour"),
        ("gmpo", "current"),
        ("m2po", "current"),
    )
}
OBJECTIVES |= {
    f"user {function}": ObjectiveSection(name=name, surrogate=f"tests.algorithm.user_surrogates:{function}")
    for name, function in (("grpo", "again_ppo"), ("mu_grpo", "early_tokens"), ("grpo", "whole_response"))
}

TRIED = (
    "mu_grpo", "grpo", "gspo", "vespo", "veto=response", "weights by prefix", "weights by prefix_min",
    "mu_grpo, k2 to a reference policy", "mu_grpo, entropy", "grpo, entropy and KL", "gspo, entropy",
)  # fmt: skip
"""What a loss asks of the row kernels and of other ranks; `test_fused_loss` has every objective, on one."""
SUPPORT_OBJECTIVES = {
    "prefix": ObjectiveSection(),
    "response": ObjectiveSection(name="gspo", entropy_coef=0.2),
    "entropy and KL": ObjectiveSection(name="grpo", entropy_coef=0.2, kl_ref="start", kl_coef=0.3),
}
"""Objectives for a softmax over `support_of_problem` a problem."""


def tolerance_of(config: ObjectiveSection) -> float:
    """Relative error in float32 that rounding explains.

    A log-probability below -4 is rounded to multiples of 5e-7, and its absolute error is the ratio's relative one. The
    exp of a sum of log-ratios enlarges it, VESPO's power again; a teacher's term may cancel most of an advantage.
    """
    if config.surrogate == "vespo":
        return 1e-4
    if config.ratio == "sequence":
        return 1e-5
    return 2e-5 if config.teacher else 4e-6


@dataclass
class Problem:
    """Hidden states of T response tokens of ragged responses, and the output weight with its padding rows."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    inputs: LossInputs
    statistics: UpdateStatistics | None = None

    @property
    def config(self) -> ObjectiveSection:
        return self.inputs.config

    def leaves(self) -> Problem:
        """The same problem with fresh leaves to differentiate."""
        return replace(
            self,
            hidden=self.hidden.detach().clone().requires_grad_(),
            weight=self.weight.detach().clone().requires_grad_(),
        )


@dataclass
class Answer:
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def make_problem(
    config: ObjectiveSection,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    lengths: tuple[int, ...] = (9, 0, 1, 20, 13),
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    sizes, tokens = torch.tensor(lengths, dtype=torch.int64), sum(lengths)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
    weight = (0.3 * torch.randn(PADDED, WIDTH, generator=generator)).to(dtype)
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    noise = 0.5 * torch.randn(tokens, generator=generator)
    if config.veto != "none":
        _plant_triggers(noise, lengths)
    advantages = torch.randn(len(lengths), generator=generator)
    advantages[-2:] = torch.tensor([-1.5, -0.5])
    segments = make_segments(sizes, response_weights(sizes, config, constant_length=32))
    segments = with_turns(segments, [np.arange(length) // 6 for length in lengths])
    problem = Problem(hidden, weight, targets, LossInputs(config, noise, advantages, segments))
    logprobs = materialised_logprobs(problem)[0]
    inputs = replace(problem.inputs, behaviour=(logprobs - noise).float())
    if config.proximal_every > 1:
        drift = 0.3 * torch.randn(tokens, generator=generator)
        inputs = replace(inputs, proximal=(logprobs - drift).float())
    if config.kl_ref:
        away = 0.4 * torch.randn(tokens, generator=generator)
        inputs = replace(inputs, ref=(logprobs - away).float())
    if config.teacher:
        away = 0.4 * torch.randn(tokens, generator=generator)
        inputs = replace(inputs, teacher=(logprobs - away).float())
    statistics = update_statistics(logprobs.float(), inputs)
    # An update's threshold lies exactly on one of its tokens; a little beyond, rounding does not decide about that one.
    statistics = replace(statistics, log_clip=statistics.log_clip * 1.001, log_drop=statistics.log_drop * 1.001)
    return replace(problem, inputs=inputs, statistics=statistics)


def _plant_triggers(log_ratio: Tensor, lengths: tuple[int, ...]) -> None:
    """Give the two last responses, which are negative ones, tokens that the policy has left behind."""
    before, last = log_ratio.split([sum(lengths[:-1]), lengths[-1]])
    for response, planted in ((before[len(before) - lengths[-2] :], STALE), (last, STALE_START)):
        for position, value in planted:
            if position < len(response):
                response[position] = value


def support_of_problem(problem: Problem) -> Tensor:
    """Five tokens per position: the sampled one and up to four others, -1 where two coincide."""
    generator = torch.Generator().manual_seed(3)
    others = torch.randint(VOCAB, (len(problem.targets), 4), generator=generator)
    support_ids = torch.cat([others, problem.targets[:, None]], 1)
    double = (support_ids[:, :, None] == support_ids[:, None, :]).tril(-1).any(2)
    return torch.where(double, -1, support_ids)


def layout_of(chunk: int, **options: Any) -> HeadLayout:
    return HeadLayout(VOCAB, TEMPERATURE, chunk=chunk, **options)


def run(problem: Problem, layout: HeadLayout, **options: Any) -> FusedLoss:
    """The fused loss."""
    return fused_policy_loss(
        problem.hidden,
        problem.weight,
        problem.targets,
        problem.inputs,
        layout,
        statistics=problem.statistics,
        **options,
    )


def fused(problem: Problem, layout: HeadLayout, **options: Any) -> Answer:
    """The fused loss and its gradients."""
    leaves = problem.leaves()
    result = run(leaves, layout, **options)
    d_hidden, d_weight = torch.autograd.grad(result.loss, (leaves.hidden, leaves.weight))
    return Answer(result.loss.detach(), result.logprobs, result.entropy, d_hidden, d_weight)


def materialised_logprobs(problem: Problem, support_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [T] from all logits at once, or those of `support_ids` tokens, in float64."""
    logits = (problem.hidden.double() @ problem.weight[:VOCAB].double().T) / TEMPERATURE
    if support_ids is not None:
        inside = torch.zeros(len(support_ids), VOCAB + 1, dtype=torch.bool).scatter(1, support_ids % (VOCAB + 1), True)
        logits = logits.masked_fill(~inside[:, :VOCAB], -1e30)
    logprobs = logits.log_softmax(1)
    return logprobs.gather(1, problem.targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


def materialised(problem: Problem, support_ids: Tensor | None = None) -> Answer:
    """Loss and gradients through autograd over all logits."""
    problem = problem.leaves()
    logprobs, entropy = materialised_logprobs(problem, support_ids)
    loss, _ = policy_loss(logprobs, problem.inputs, problem.statistics, entropy)
    d_hidden, d_weight = torch.autograd.grad(loss, (problem.hidden, problem.weight))
    return Answer(loss.detach(), logprobs.detach(), entropy.detach(), d_hidden, d_weight)


def distance(result: Tensor | None, expected: Tensor | None) -> float:
    """|found - expected| / |expected| in the Euclidean norm; 0 where both are 0. AssertionError where one is None."""
    assert result is not None
    assert expected is not None
    result, expected = result.double(), expected.double()
    difference = (result - expected).norm()
    return 0.0 if difference == 0 else (difference / expected.norm()).item()


def loss_error(result: Tensor, expected: Tensor) -> float:
    """|found - expected|, relative where the loss is above 1: terms of either sign cancel in a small one."""
    return abs(result.item() - expected.item()) / max(1.0, abs(expected.item()))


def errors(result: Answer, expected: Answer) -> dict[str, float]:
    """How far each part of an answer is from the expected one."""
    others = [field.name for field in fields(Answer) if field.name != "loss"]
    return {"loss": loss_error(result.loss, expected.loss)} | {
        name: distance(getattr(result, name), getattr(expected, name)) for name in others
    }


def assert_same(result: Answer, expected: Answer, tolerance: float) -> None:
    apart = errors(result, expected)
    assert max(apart.values()) <= tolerance, apart
