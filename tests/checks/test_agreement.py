"""What rounding explains of the difference between engine and learner, and what is said about the rest."""

from __future__ import annotations

import numpy as np
import pytest

from mugrpo_megatron.checks.agreement import BOUNDS, Agreement, agreement, bound, disagreement

LEARNER = [np.linspace(-5.0, -0.1, 40, dtype=np.float32), np.full(8, -2.0, dtype=np.float32)]


def test_the_mean_is_over_tokens_of_all_texts() -> None:
    found = agreement([LEARNER[0] + np.float32(0.5), LEARNER[1]], LEARNER)
    assert found.mean == pytest.approx(0.5 * 40 / 48)
    assert found.tokens == 48
    assert agreement([], []) == Agreement(0.0, 0, 1.0)
    assert agreement([row[:0] for row in LEARNER], [row[:0] for row in LEARNER]).tokens == 0


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_difference_within_rounding_says_nothing_and_one_beyond_it_does(dtype: str) -> None:
    fp8 = dtype == "fp8"
    most = bound("bfloat16" if fp8 else dtype, fp8)
    for factor, said in ((0.9, False), (1.1, True)):
        shifted = [row + np.float32(factor * most) for row in LEARNER]
        assert bool(disagreement(agreement(shifted, LEARNER), most)) == said


def test_what_is_not_finite_is_no_agreement() -> None:
    for value in (np.nan, -np.inf):
        broken = [LEARNER[0], np.full(8, value, dtype=np.float32)]
        assert "not finite" in disagreement(agreement(broken, LEARNER), 0.1)
        assert "not finite" in disagreement(agreement(LEARNER, broken), 0.1)


def test_the_likely_causes_are_named() -> None:
    growing = [row + np.linspace(0.0, 2.0, len(row), dtype=np.float32) for row in LEARNER]
    sentence = disagreement(agreement(growing, LEARNER), 0.1, ["zeta", "rope_parameters.eta"])
    assert "differ by 1 nats a token on 48 tokens" in sentence
    assert "grows with the position, so look at rope_theta" in sentence
    assert "without effect: zeta, rope_parameters.eta; remove them" in sentence
    level = [row + np.float32(1.0) for row in LEARNER]
    assert "grows" not in disagreement(agreement(level, LEARNER), 0.1)
