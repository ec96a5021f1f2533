"""Engine/learner mismatch corrections; weights of the three reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mugrpo_megatron.algorithm.masks import counted_responses, mismatch_correction, response_weights
from mugrpo_megatron.recipe import ObjectiveSection

RATIO = torch.tensor([0.01, 0.5, 1.0, 1.9, 5.0, 100.0])


def test_tis_truncates_and_icepop_drops_outside_its_range() -> None:
    def correction(**fields: Any) -> torch.Tensor | None:
        return mismatch_correction(RATIO.log(), torch.zeros(6), ObjectiveSection(**fields))

    assert correction(name="grpo") is None
    torch.testing.assert_close(correction(name="tis"), torch.tensor([0.01, 0.5, 1.0, 1.9, 2.0, 2.0]))
    kept = correction(name="icepop", mismatch_range=(0.4, 5.5))
    torch.testing.assert_close(kept, torch.tensor([0.0, 0.5, 1.0, 1.9, 5.0, 0.0]))
    apart = torch.tensor([-500.0, 0.0])
    for name in ("tis", "icepop"):
        result = mismatch_correction(apart, apart.flip(0), ObjectiveSection(name=name))
        assert result is not None
        assert result.isfinite().all()


LENGTHS = torch.tensor([4, 0, 1, 5])
COUNTED = torch.tensor([True, True, False, True])


@pytest.mark.parametrize(
    ("reduction", "weights", "masked"),
    [
        ("token_mean", [1 / 10] * 4, [1 / 9, 1 / 9, 0, 1 / 9]),
        ("sequence_mean", [1 / 16, 1 / 4, 1 / 4, 1 / 20], [1 / 12, 1 / 3, 0, 1 / 15]),
        ("constant", [1 / 32] * 4, [1 / 24, 1 / 24, 0, 1 / 24]),
    ],
)
def test_weights(reduction: str, weights: list[float], masked: list[float]) -> None:
    config = ObjectiveSection(reduction=reduction)
    result = response_weights(LENGTHS, config, constant_length=8)
    assert result.tolist() == pytest.approx(weights)
    result = response_weights(LENGTHS, config, constant_length=8, counted=COUNTED)
    assert result.tolist() == pytest.approx(masked)
    for lengths in (torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)):
        assert response_weights(lengths, config, constant_length=8).isfinite().all()
    assert not response_weights(LENGTHS, config, constant_length=8, counted=torch.zeros(4, dtype=torch.bool)).any()


@pytest.mark.parametrize(
    ("zero_variance", "truncated", "counted"),
    [
        ("count", "count", None),
        ("leave_out", "count", [True, True, False, False]),
        ("mask", "count", [True, True, False, False]),
        ("count", "mask", [False, True, False, True]),
        ("mask", "mask", [False, True, False, False]),
    ],
)
def test_responses_that_count(zero_variance: str, truncated: str, counted: list[bool] | None) -> None:
    config = ObjectiveSection(zero_variance=zero_variance, truncated=truncated)
    rewards, groups = np.array([0.0, 1.0, 1.0, 1.0]), np.array([0, 0, 1, 1])
    result = counted_responses(rewards, groups, np.array([True, False, True, False]), config)
    assert (None if result is None else result.tolist()) == counted
