from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mugrpo_megatron.evaluation.estimators import (
    Interval,
    clustered_interval,
    macro_average,
    majority_at_k,
    mean_interval,
    pass_at_k,
)


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples: int) -> None:
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        draws = list(itertools.combinations([i < correct for i in range(samples)], k))
        assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=7), st.sampled_from("abc"))
def test_majority_is_the_mean_over_fair_draws_among_the_most_frequent(answers: list[str], right: str) -> None:
    rewards = [float(answer == right) for answer in answers]
    counts = {answer: answers.count(answer) for answer in answers if answer}
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    expected = sum(winner == right for winner in winners) / len(winners) if winners else 0.0
    assert majority_at_k(answers, rewards) == pytest.approx(expected)
    assert majority_at_k(answers[::-1], rewards[::-1]) == pytest.approx(expected)


def wilson(p: float, n: float) -> tuple[float, float]:
    """The roots of the score equation (p - x)^2 = z^2 x (1 - x) / n, found numerically."""
    z = 1.959963984540054
    roots = np.roots([1 + z * z / n, -(2 * p + z * z / n), p * p])
    return tuple(sorted(roots.real))


@given(st.integers(0, 40), st.integers(1, 40))
def test_one_sample_a_problem_gives_wilsons_interval(correct: int, n: int) -> None:
    correct = min(correct, n)
    interval = clustered_interval([1.0] * correct + [0.0] * (n - correct))
    assert (interval.low, interval.high) == pytest.approx(wilson(correct / n, n), abs=1e-9)
    assert interval.value == pytest.approx(correct / n)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.integers(1, 64))
def test_an_interval_holds_its_estimate_and_has_width(values: list[float], samples: int) -> None:
    interval = clustered_interval(values, samples)
    assert 0.0 <= interval.low <= interval.value <= interval.high <= 1.0
    assert interval.high > interval.low


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_wrong_and_all_right_leave_doubt_that_problems_alone_reduce(value: float) -> None:
    few, many = clustered_interval([value] * 10, 64), clustered_interval([value] * 100, 64)
    assert few.high - few.low == pytest.approx(0.278, abs=1e-3)  # the rule of three says 0.3
    assert many.high - many.low < 0.04


def test_samples_of_one_problem_are_not_independent() -> None:
    """Problems that are solved always or never: sixteen samples of each tell no more than one."""
    solved = [1.0] * 30 + [0.0] * 30
    assert clustered_interval(solved, 16) == clustered_interval(solved, 1)


@pytest.mark.parametrize("samples", [1, 8])
def test_intervals_cover_the_truth_as_often_as_they_say(samples: int) -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(600):
        chances = generator.beta(0.6, 0.9, size=80)
        interval = clustered_interval((generator.binomial(samples, chances) / samples).tolist(), samples)
        covered += interval.low <= 0.4 <= interval.high
    assert 0.93 <= covered / 600 <= 0.98


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=8))
def test_the_average_over_sets_is_unweighted_and_narrower_than_the_widest(parts: list[tuple[float, ...]]) -> None:
    sets = [Interval(v, max(0.0, v - below), min(1.0, v + above)) for v, below, above in parts]
    average = macro_average(sets)
    assert average.value == pytest.approx(sum(v for v, _, _ in parts) / len(parts))
    assert average.high - average.low <= max(i.high - i.low for i in sets) + 1e-9


def test_the_average_of_equal_independent_sets_narrows_with_their_root() -> None:
    one = Interval(0.5, 0.4, 0.6)
    average = macro_average([one] * 4)
    assert (average.low, average.high) == pytest.approx((0.45, 0.55))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=40), st.floats(-10, 10), st.floats(0.01, 100))
def test_a_mean_rewards_interval_moves_and_scales_with_the_rewards(values: list[float], by: float, to: float) -> None:
    moved = [to * value + by for value in values]
    assume(min(moved) < max(moved))
    before, after = mean_interval(values), mean_interval(moved)
    for end in ("low", "value", "high"):
        assert getattr(after, end) == pytest.approx(to * getattr(before, end) + by, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("problems", [4, 30])
def test_mean_rewards_intervals_cover_the_truth_as_often_as_they_say(problems: int) -> None:
    """Student's interval is exact for normal values: 95 % whatever their number is."""
    generator = np.random.default_rng(1)
    intervals = [mean_interval(generator.normal(-2.0, 3.0, problems).tolist()) for _ in range(4000)]
    assert sum(i.low <= -2.0 <= i.high for i in intervals) / 4000 == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize("rewards", [[3.0], [3.0, 3.0], [3.0] * 40])
def test_equal_rewards_do_not_say_how_far_rewards_spread(rewards: list[float]) -> None:
    """Nor does an average with a set of such rewards."""
    assert mean_interval(rewards) == Interval(3.0, -math.inf, math.inf)
    average = macro_average([mean_interval(rewards), Interval(1.0, 0.5, 1.5)])
    assert average == Interval(2.0, -math.inf, math.inf)


@given(st.floats(-5, 5), st.floats(0, 3), st.floats(0, 3))
def test_the_average_of_one_set_is_that_set(value: float, below: float, above: float) -> None:
    average = macro_average([Interval(value, value - below, value + above)])
    assert (average.low, average.value, average.high) == pytest.approx((value - below, value, value + above), abs=1e-12)


@pytest.mark.parametrize(
    ("estimate", "words"),
    [
        *((partial(pass_at_k, 4, 2, k), "needs at least") for k in (0, 5)),
        *((partial(function, []), "at least one") for function in (clustered_interval, macro_average, mean_interval)),
    ],
)
def test_what_has_no_estimate_is_refused(estimate: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        estimate()
