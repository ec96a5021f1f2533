"""Weights of the three reductions."""

from __future__ import annotations

import pytest
import torch

from mugrpo_megatron.algorithm.masks import response_weights
from mugrpo_megatron.recipe import ObjectiveSection

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
    found = response_weights(LENGTHS, config, constant_length=8)
    assert found.tolist() == pytest.approx(weights)
    found = response_weights(LENGTHS, config, constant_length=8, counted=COUNTED)
    assert found.tolist() == pytest.approx(masked)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_nothing_to_weigh_is_finite(reduction: str) -> None:
    config = ObjectiveSection(reduction=reduction)
    for lengths in (torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)):
        assert response_weights(lengths, config, constant_length=8).isfinite().all()
    assert not response_weights(LENGTHS, config, constant_length=8, counted=torch.zeros(4, dtype=torch.bool)).any()
