"""Intervals, tests and corrections against values worked out elsewhere."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.evaluation.estimators import student
from run_scripts.study.results import counted, differences, holm, mean_of, scientific, sign_flip

points = st.lists(st.integers(-20, 20), min_size=1, max_size=7)


def test_the_interval_is_students() -> None:
    mean = mean_of([0.60, 0.62, 0.64])
    assert mean.value == pytest.approx(0.62)
    assert mean.half == pytest.approx(4.303 * 0.02 / 3**0.5)  # t(0.975, 2) from a printed table, s = 0.02
    assert all(wide > narrow > 1.96 for wide, narrow in pairwise([student(n) for n in range(1, 40)]))


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    assert (mean_of([0.5]).value, mean_of([0.5]).half, mean_of([0.5]).n) == (0.5, None, 1)
    with pytest.raises(ValueError, match="needs a value"):
        mean_of([])


def test_differences_are_of_seeds_that_both_have() -> None:
    assert differences({0: 0.5, 1: 0.9, 3: 0.7}, {3: 0.2, 1: 0.8, 5: 0.0}) == pytest.approx([0.1, 0.5])


@given(points)
def test_a_sign_flip_test_counts_patterns_whose_mean_is_as_high(values: list[int]) -> None:
    sums = [sum(s * v for s, v in zip(signs, values, strict=True)) for signs in product((1, -1), repeat=len(values))]
    expected = sum(one >= sum(values) for one in sums) / len(sums)
    assert sign_flip([value / 100 for value in values]) == pytest.approx(expected)


def test_eight_seeds_on_one_side_are_the_least_p_there_is() -> None:
    assert sign_flip([0.1] * 8) == 1 / 256
    assert sign_flip([-0.1] * 8) == 1
    assert sign_flip([-0.005] * 8, bound=-0.01) == 1 / 256
    assert sign_flip([0.0] * 8) == 1
    with pytest.raises(ValueError, match="at least one"):
        sign_flip([])


def test_holm_multiplies_by_what_is_left_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # the textbook's example
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_corrected_ps_keep_the_order_and_the_least_is_bonferronis(ps: list[float]) -> None:
    corrected = holm(ps)
    assert all(p <= one <= 1 for p, one in zip(ps, corrected, strict=True))
    assert [one for _, one in sorted(zip(ps, corrected, strict=True))] == sorted(corrected)
    assert min(corrected) == min(1.0, len(ps) * min(ps))


def test_rates_and_counts_are_written_as_people_write_them() -> None:
    rates = {1.6e-4: "1.6·10⁻⁴", 1e-5: "10⁻⁵", 2.5e-6: "2.5·10⁻⁶", 1.28e-3: "1.28·10⁻³", 20.0: "2·10¹", None: "–"}
    assert {rate: scientific(rate) for rate in rates} == rates
    assert [counted(number, "seed") for number in (0, 1, 8)] == ["0 seeds", "1 seed", "8 seeds"]
