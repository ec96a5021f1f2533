"""The inputs of an update's loss, made from its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.learner.loss import make_loss_inputs
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Sample
from tests.learner.tiny import samples


def loss_and_gradients(
    section: ObjectiveSection, data: Sequence[Sample], advantages: np.ndarray
) -> tuple[float, list[list[float]]]:
    """The loss, and the gradient of each response's log-probabilities."""
    inputs = make_loss_inputs(section, 24, data, advantages, torch.device("cpu"))
    logprobs = torch.cat([torch.from_numpy(s.engine_logprobs + 0.1 * (s.response_ids % 5 - 2)) for s in data])
    logprobs.requires_grad_()
    loss, _ = policy_loss(logprobs, inputs, entropy=logprobs.detach().abs())
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), [row.tolist() for row in logprobs.grad.split([len(s.response_ids) for s in data])]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("zero_variance", ["count", "mask"])
def test_a_masked_response_that_was_cut_is_in_the_baseline_and_nowhere_else(reduction: str, zero_variance: str) -> None:
    """Loss and gradients equal an update's that never had it, with the advantages of the groups that did."""
    section = ObjectiveSection(
        reduction=reduction, zero_variance=zero_variance, kl_ref="start", kl_coef=0.1, entropy_coef=0.01
    )
    data = [replace(s, ref_logprobs=s.engine_logprobs - np.float32(0.2)) for s in samples()]
    cut = [index % 3 == 1 for index in range(len(data))]
    data = [replace(s, finish_reason="length" if c else "stop") for s, c in zip(data, cut, strict=True)]
    # Rewards differ in every group but the first, also among its responses that were not cut.
    data = [replace(s, reward=float(s.group > 0 and index % 2)) for index, s in enumerate(data)]
    advantages = group_advantages(np.array([s.reward for s in data]), np.array([s.group for s in data]), section)
    loss, gradients = loss_and_gradients(section.model_copy(update={"truncated": "mask"}), data, advantages)
    left = [index for index, is_cut in enumerate(cut) if not is_cut]
    expected, others = loss_and_gradients(section, [data[index] for index in left], advantages[left])
    assert loss == pytest.approx(expected, rel=1e-6)
    for index, row in enumerate(gradients):
        assert row == pytest.approx([0.0] * len(row) if cut[index] else others[left.index(index)], rel=1e-6)
    counted, _ = loss_and_gradients(section, data, advantages)
    assert counted != pytest.approx(expected, rel=1e-3)
