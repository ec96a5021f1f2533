"""Diagnostics against numpy on the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mugrpo_megatron.algorithm.diagnostics import METRICS
from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.segments import make_segments
from mugrpo_megatron.recipe import ObjectiveSection
from tests.algorithm.batches import Batch, batches, random_batch


def metrics_of(batch: Batch, config: ObjectiveSection) -> dict[str, float]:
    with torch.no_grad():
        return policy_loss(*batch.tensors(), batch.segments(config), config, anchor=batch.anchor_for(config))[1]


@settings(deadline=None)
@given(batches())
def test_only_documented_names_are_reported(batch: Batch) -> None:
    assert set(metrics_of(batch, ObjectiveSection())) <= {name for name, _, _ in METRICS}


def test_every_documented_name_is_reported_on_an_ordinary_batch() -> None:
    batch = random_batch(0, [9, 8, 7, 6, 5])
    batch.advantages = [-1.0, 1.0, 0.0, -1.0, 1.0]
    config = ObjectiveSection(trigger_ratio=0.9, kl_anchor="start", teacher="t")
    logprobs, behaviour, advantages = batch.tensors()
    segments = replace(batch.segments(config), teacher=behaviour)
    found = policy_loss(logprobs, behaviour, advantages, segments, config, anchor=batch.anchor_for(config))[1]
    assert set(found) == {name for name, _, _ in METRICS}


def test_values() -> None:
    batch = random_batch(4, [50, 40, 30, 20])
    batch.advantages = [-1.5, 0.5, 0.0, 2.0]
    found = metrics_of(batch, ObjectiveSection(name="grpo"))
    log_ratio = np.concatenate([np.subtract(*pair) for pair in zip(batch.logprobs, batch.behaviour, strict=True)])
    advantage = np.repeat(batch.advantages, [50, 40, 30, 20])
    ratio = np.exp(log_ratio)
    clipped = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
    expected = {
        "ratio_mean": ratio.mean(),
        "ess": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
        "kl_k1": -log_ratio.mean(),
        "kl_k3": (ratio - 1 - log_ratio).mean(),
        "second_moment": (log_ratio**2).mean(),
        "clipped_fraction": clipped.mean(),
        "vetoed_fraction": 0,
        "zero_advantage_fraction": 0.25,
        "advantage_mean": np.mean(batch.advantages),
        "advantage_std": np.std(batch.advantages),
        "advantage_max": np.abs(batch.advantages).max(),
        "update_tokens": 140,
    }
    for sign, tokens in (("neg", ratio[advantage < 0]), ("pos", ratio[advantage > 0])):
        expected[f"ratio_{sign}_mean"] = tokens.mean()
        expected[f"ratio_{sign}_min"], expected[f"ratio_{sign}_max"] = tokens.min(), tokens.max()
        for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
            expected[f"ratio_{sign}_{name}"] = np.quantile(tokens, q, method="nearest")
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_first_trigger_is_a_share_of_the_response() -> None:
    """Triggers at 1 of 4 and at 5 of 10 tokens; a third negative response has none, a positive one does not count."""
    ratio = torch.ones(4 + 10 + 3 + 2)
    ratio[[1, 3, 4 + 5, 17]] = 1e-5
    segments = make_segments(torch.tensor([4, 10, 3, 2]), torch.ones(4))
    advantages = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    found = policy_loss(ratio.log(), torch.zeros(19), advantages, segments, ObjectiveSection())[1]
    assert found["veto_first_trigger"] == pytest.approx((1 / 4 + 5 / 10) / 2)
    assert found["vetoed_responses"] == pytest.approx(2 / 3)
    assert found["vetoed_fraction"] == pytest.approx((1 + 4) / 19)


def test_what_no_token_qualifies_for_is_left_out() -> None:
    found = metrics_of(random_batch(0, []), ObjectiveSection())
    assert found == {"loss": 0.0, "update_tokens": 0.0}
