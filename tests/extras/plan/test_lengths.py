"""Response lengths and the decoding time, against a token-by-token simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.extras.plan.lengths import resident_mean, response_lengths, seconds_to_decode


def step(running: int) -> float:
    return 0.01 + 2e-5 * running


def token_by_token(lengths: np.ndarray, slots: int) -> float:
    """An engine that makes one token of every running response a step and refills empty slots from a queue."""
    queue = np.ceil(lengths).astype(int)
    left, waiting = queue[:slots].copy(), queue[slots:]
    seconds = 0.0
    while left.size:
        seconds += step(left.size)
        left -= 1
        free = int((left == 0).sum())
        left = np.concatenate([left[left > 0], waiting[:free]])
        waiting = waiting[free:]
    return seconds


@pytest.mark.parametrize(("requests", "slots"), [(64, 64), (200, 512), (1000, 64), (1100, 1000), (20_000, 256)])
@pytest.mark.parametrize("spread", [0.1, 0.8, 1.5])
def test_decoding_time_is_that_of_a_simulation(requests: int, slots: int, spread: float) -> None:
    lengths = response_lengths(300, 2000, spread)
    rng = np.random.default_rng(0)
    runs = [token_by_token(rng.choice(lengths, requests), min(slots, requests)) for _ in range(4)]
    assert seconds_to_decode(requests, slots, lengths, step) == pytest.approx(np.mean(runs), rel=0.1)


@given(mean=st.floats(1.5, 900), longest=st.integers(1000, 5000), spread=st.floats(0.05, 2.0))
def test_lengths_have_the_mean_and_the_limit_that_were_asked_for(mean: float, longest: int, spread: float) -> None:
    lengths = response_lengths(mean, longest, spread)
    assert lengths.max() <= longest
    assert lengths.min() >= 1
    assert (np.diff(lengths) >= 0).all()
    assert lengths.mean() == pytest.approx(mean, rel=0.02) or (lengths == 1).any()


def test_a_mean_at_the_limit_makes_all_lengths_the_limit() -> None:
    np.testing.assert_allclose(response_lengths(100, 100, 0.8), 100, rtol=1e-3)


def test_running_responses_of_one_length_are_half_done() -> None:
    lengths = np.full(4, 80.0)
    assert resident_mean(lengths) == 40


def test_nothing_takes_no_time_and_more_takes_longer() -> None:
    lengths = response_lengths(300, 2000, 0.8)
    assert seconds_to_decode(0, 8, lengths, step) == 0
    times = [seconds_to_decode(n, 64, lengths, step) for n in (1, 10, 64, 65, 200, 1000)]
    assert times == sorted(times)
