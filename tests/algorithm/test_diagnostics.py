"""Diagnostics against numpy on the same tokens; triggers at six thresholds against sets of tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.diagnostics import METRICS
from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.segments import LossInputs, make_segments
from mugrpo_megatron.algorithm.veto import THRESHOLDS, TRIGGER_METRICS
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.objective import PRESETS
from tests.algorithm.batches import Batch, batches, random_batch
from tests.algorithm.test_veto import SCOPES, dropped_by_definition


def metrics_of(batch: Batch, config: ObjectiveSection) -> dict[str, float]:
    with torch.no_grad():
        return policy_loss(batch.leaf(), batch.inputs(config))[1]


def test_every_documented_name_is_reported_on_an_ordinary_batch() -> None:
    batch = random_batch(0, [9, 8, 7, 6, 5])
    batch.advantages = [-1.0, 1.0, 0.0, -1.0, 1.0]
    config = ObjectiveSection(trigger_ratio=0.9, kl_ref="start", teacher="t")
    inputs = batch.inputs(config)
    metrics = policy_loss(batch.leaf(), replace(inputs, teacher=inputs.behaviour))[1]
    by_prefix = metrics_of(batch, ObjectiveSection(veto="prefix"))
    assert set(metrics) | set(by_prefix) == {name for name, _, _ in METRICS}


def test_the_lost_weight_is_of_the_negative_responses() -> None:
    """Ratios 1/2, 1, 1/2, 1 weigh 1, 1/2, 1/2, 1/4; a positive response loses nothing."""
    log_ratio = torch.tensor([0.5, 1.0, 0.5, 1.0, 0.1, 1.0]).log()
    segments = make_segments(torch.tensor([4, 2]), torch.ones(2))
    inputs = LossInputs(ObjectiveSection(veto="prefix"), torch.zeros(6), torch.tensor([-1.0, 1.0]), segments)
    assert policy_loss(log_ratio, inputs)[1]["prefix_weight_lost"] == pytest.approx(1 - 2.25 / 4)


def test_values() -> None:
    batch = random_batch(4, [50, 40, 30, 20])
    batch.advantages = [-1.5, 0.5, 0.0, 2.0]
    result = metrics_of(batch, ObjectiveSection(name="grpo", kl_ref="start"))
    log_ratio = np.concatenate([np.subtract(*pair) for pair in zip(batch.logprobs, batch.behaviour, strict=True)])
    advantage = np.repeat(batch.advantages, [50, 40, 30, 20])
    ratio = np.exp(log_ratio)
    d = np.concatenate([np.subtract(*pair) for pair in zip(batch.logprobs, batch.ref, strict=True)])
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
        "kl_ref": (np.exp(-d) - 1 + d).mean(),
        "kl_ref_k1": d.mean(),
    }
    for sign, tokens in (("neg", ratio[advantage < 0]), ("pos", ratio[advantage > 0])):
        expected[f"ratio_{sign}_mean"] = tokens.mean()
        expected[f"ratio_{sign}_min"], expected[f"ratio_{sign}_max"] = tokens.min(), tokens.max()
        for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
            expected[f"ratio_{sign}_{name}"] = np.quantile(tokens, q, method="nearest")
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_first_trigger_is_a_share_of_the_response() -> None:
    """Triggers at 1 of 4 and at 5 of 10 tokens; a third negative response has none, a positive one does not count."""
    ratio = torch.ones(4 + 10 + 3 + 2)
    ratio[[1, 3, 4 + 5, 17]] = 1e-5
    segments = make_segments(torch.tensor([4, 10, 3, 2]), torch.ones(4))
    advantages = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    result = policy_loss(ratio.log(), LossInputs(ObjectiveSection(), torch.zeros(19), advantages, segments))[1]
    assert result["veto_first_trigger"] == pytest.approx((1 / 4 + 5 / 10) / 2)
    assert result["vetoed_responses"] == pytest.approx(2 / 3)
    assert result["vetoed_fraction"] == pytest.approx((1 + 4) / 19)


def test_what_no_token_qualifies_for_is_left_out() -> None:
    result = metrics_of(random_batch(0, []), ObjectiveSection())
    assert result == {"loss": 0.0, "update_tokens": 0.0}


@st.composite
def stale_batches(draw: st.DrawFn) -> Batch:
    """Batches with ratios on either side of every threshold."""
    batch = draw(batches())
    far = st.sampled_from([math.log(10.0**k) + shift for k in range(-7, 0) for shift in (-0.1, 0.1)])
    for row, logprobs in zip(batch.behaviour, batch.logprobs, strict=True):
        for t in range(len(row)):
            if draw(st.integers(0, 3)) == 0:
                row[t] = logprobs[t] - draw(far)
    return batch


def by_sets(batch: Batch, threshold: float) -> dict[str, float]:
    """Shares at one threshold, token by token."""
    ratios = [
        [math.exp(x - y) for x, y in zip(*rows, strict=True)]
        for rows in zip(batch.logprobs, batch.behaviour, strict=True)
    ]
    sets = [dropped_by_definition(row, a, threshold) for row, a in zip(ratios, batch.advantages, strict=True)]
    dropped = {scope: sum(len(of[scope]) for of in sets) for scope in SCOPES[1:]}
    shares = {
        f"dropped_{scope}": count / tokens for scope, count in dropped.items() if (tokens := sum(map(len, ratios)))
    }
    if negative := [len(row) for row, a in zip(ratios, batch.advantages, strict=True) if a < 0 and row]:
        shares["trigger_tokens"] = dropped["trigger"] / sum(negative)
        shares["trigger_responses"] = sum(bool(of["trigger"]) for of in sets) / len(negative)
    return shares


@settings(max_examples=100)
@given(stale_batches(), st.sampled_from(sorted(PRESETS)))
def test_equal_counts_of_tokens_whatever_the_objective(batch: Batch, name: str) -> None:
    result = metrics_of(batch, ObjectiveSection(name=name))
    expected = {f"{key}_{th}": share for th in THRESHOLDS for key, share in by_sets(batch, float(th)).items()}
    assert {name: result[name] for name, _, _ in TRIGGER_METRICS if name in result} == pytest.approx(
        expected, abs=1e-12
    )
