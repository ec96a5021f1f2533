"""The entropy bonus: its gradient in the logits by finite differences, and what it weighs."""

from __future__ import annotations

import pytest
import torch

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.kernels.torch_ops import EntropyTerm, gradient
from mugrpo_megatron.recipe import ObjectiveSection
from tests.algorithm.batches import random_batch

SCALE, VALID, COLUMNS = 1.3, 9, 11


def value(logits: torch.Tensor, targets: torch.Tensor, of_logprob: torch.Tensor, of_entropy: torch.Tensor) -> float:
    every = (logits[:, :VALID] * SCALE).log_softmax(1)
    entropy = -(every.exp() * every).sum(1)
    return float((of_logprob * every.gather(1, targets[:, None])[:, 0] + of_entropy * entropy).sum())


def test_the_gradient_in_the_logits_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, COLUMNS, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 3, 8, 5])
    of_logprob, of_entropy = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    every = (logits[:, :VALID] * SCALE).log_softmax(1)
    entropy, lse = -(every.exp() * every).sum(1), (logits[:, :VALID] * SCALE).logsumexp(1)
    term = EntropyTerm(entropy, of_entropy)
    found = gradient(logits.float(), SCALE, VALID, targets, lse.float(), of_logprob.float(), torch.float32, term)
    step = 1e-6
    for row in range(4):
        for column in range(COLUMNS):
            there, back = logits.clone(), logits.clone()
            there[row, column] += step
            back[row, column] -= step
            slope = (value(there, targets, of_logprob, of_entropy) - value(back, targets, of_logprob, of_entropy)) / 2
            assert found[row, column].item() == pytest.approx(slope / step, rel=1e-4, abs=1e-5)


def test_the_bonus_has_the_weights_of_the_tokens_and_no_veto_takes_it() -> None:
    batch = random_batch(1, [4, 2])
    batch.advantages = [-1.0, 1.0]
    batch.behaviour[0] = [x + 12 for x in batch.logprobs[0]]
    entropy = torch.rand(6, dtype=torch.float64, requires_grad=True)
    config = ObjectiveSection(veto="response", entropy_coef=0.25, reduction="sequence_mean")
    segments = batch.segments(config)
    loss, metrics = policy_loss(*batch.tensors(), segments, config, entropy=entropy)
    assert metrics["vetoed_fraction"] == pytest.approx(4 / 6)
    (slope,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(slope, -0.25 * torch.tensor([1 / 8] * 4 + [1 / 4] * 2, dtype=torch.float64))


def test_a_bonus_without_entropies_is_an_error() -> None:
    batch = random_batch(1, [4, 2])
    config = ObjectiveSection(entropy_coef=0.25)
    with pytest.raises(ValueError, match="needs the entropy"):
        policy_loss(*batch.tensors(), batch.segments(config), config)
