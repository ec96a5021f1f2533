"""Vocabulary and sequence parallelism on gloo ranks against one rank with all logits at once."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import parallel
from tests.kernels.problems import OBJECTIVES, tolerance_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.process


def tolerance(name: str) -> float:
    """exp of a sum of log-ratios enlarges their rounding."""
    return tolerance_of(OBJECTIVES[name])


@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_parallel(world: int) -> None:
    for worst in run_ranks(world, parallel.vocabulary_parallel, torch.float32):
        assert set(worst) == set(OBJECTIVES)
        for name, errors in worst.items():
            assert all(error < tolerance(name) for error in errors.values()), (name, errors)


def test_vocabulary_parallel_in_bfloat16() -> None:
    for worst in run_ranks(2, parallel.vocabulary_parallel, torch.bfloat16):
        for name, errors in worst.items():
            assert all(error < 1e-2 for error in errors.values()), (name, errors)


def test_sequence_parallel() -> None:
    assert max(run_ranks(2, parallel.sequence_parallel)) < 1e-6


def test_ranks_agree_on_log_probabilities_to_the_bit() -> None:
    (first, error), *others = run_ranks(4, parallel.logprobs)
    assert error < 1e-6
    assert all(values == first for values, _ in others)
