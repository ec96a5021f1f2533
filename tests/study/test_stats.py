"""Intervals, paired differences and crossing times against values worked out elsewhere."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from run_scripts.study.results import T975, difference, fisher_exact, mean_of, pooled_deviation, reached

accuracies = st.floats(0, 1, allow_nan=False)


def test_the_interval_is_students() -> None:
    mean = mean_of([0.60, 0.62, 0.64])
    assert mean.value == pytest.approx(0.62)
    assert mean.half is not None
    assert mean.half == pytest.approx(4.303 * 0.02 / 3**0.5)  # t(0.975, 2) from a printed table, s = 0.02
    assert (mean.low, mean.high) == (pytest.approx(0.62 - mean.half), pytest.approx(0.62 + mean.half))


def test_t_quantiles_fall_towards_the_normal() -> None:
    assert all(wide > narrow > 1.96 for wide, narrow in pairwise(T975[1:]))


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    mean = mean_of([0.5])
    assert (mean.value, mean.half, mean.low, mean.n) == (0.5, None, None, 1)
    with pytest.raises(ValueError, match="at least one"):
        mean_of([])


def test_a_difference_is_taken_seed_by_seed() -> None:
    apart = difference({0: 0.5, 1: 0.9, 2: 0.7}, {0: 0.4, 1: 0.8, 5: 0.0})
    assert apart is not None
    assert apart.value == pytest.approx(0.1)
    assert apart.half == pytest.approx(0.0, abs=1e-12)  # seeds differ widely, the pairs do not
    assert difference({0: 0.5}, {1: 0.5}) is None


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_fishers_p_is_the_share_of_ways_to_deal_the_events_that_are_no_likelier(
    left: int, right: int, data: st.DataObject
) -> None:
    """Against all ways to deal the events over the trials, one by one."""
    events, others = data.draw(st.integers(0, left)), data.draw(st.integers(0, right))
    dealt = [sum(place < left for place in places) for places in combinations(range(left + right), events + others)]
    ways = {count: dealt.count(count) for count in set(dealt)}
    expected = sum(many for many in ways.values() if many <= ways[events]) / len(dealt)
    assert fisher_exact((events, left), (others, right)) == pytest.approx(expected)


def test_repeats_spread_about_the_mean_of_their_own_group() -> None:
    spread = pooled_deviation([[0.5, 0.7], [10.0], [3.0, 3.3, 3.6]])
    assert spread == pytest.approx(((0.02 + 0.18) / 3) ** 0.5)
    assert pooled_deviation([[1.0], [2.0]]) is None


@given(st.lists(accuracies, min_size=1, max_size=8), accuracies)
def test_a_curve_reaches_a_level_between_the_points_that_enclose_it(ys: list[float], level: float) -> None:
    xs = [float(x) for x in range(len(ys))]
    there = reached(xs, ys, level)
    if there is None:
        assert max(ys) < level
    else:
        before, after = int(there), min(int(there) + 1, len(ys) - 1)
        assert all(y < level for y in ys[: before + (there > before)])
        assert max(ys[before], ys[after]) >= level


def test_a_curve_is_straight_between_its_points() -> None:
    assert reached([0.0, 10.0, 20.0], [0.4, 0.6, 0.5], 0.55) == pytest.approx(7.5)
    assert reached([3.0, 4.0], [0.7, 0.1], 0.6) == 3.0
