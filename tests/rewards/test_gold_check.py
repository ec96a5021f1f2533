"""Golds that verify, and matches that need no parser."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.gold_check import unusable_golds
from mugrpo_megatron.rewards.math.compare import compare_answer
from mugrpo_megatron.rewards.math.literal import literal_verdict
from mugrpo_megatron.samples import Problem


@pytest.mark.process
def test_golds_that_cannot_be_verified_are_named_one_by_one() -> None:
    """Also those that hang the parser: they are no failure of a user's function, which would end the run."""
    golds = ["7", "x+1", "((9!)!)!", "\\boxed{}", "\\frac{1}{2}", "\\prod_{k=1}^{10000000} k", "1,-2"]
    problems = [Problem(f"set.jsonl:{line}", "q", gold, "set") for line, gold in enumerate(golds, start=1)]
    found = unusable_golds(problems, RewardSection(workers=1, timeout_s=16.0))
    assert sorted(found) == ["set.jsonl:3", "set.jsonl:4", "set.jsonl:6"]
    assert found["set.jsonl:3"] == "set.jsonl:3: the answer '((9!)!)!' does not verify against itself"


RATIONALS = st.fractions(min_value=-50, max_value=50, max_denominator=12)


def spellings(value: Fraction) -> list[str]:
    top, under = value.numerator, value.denominator
    made = [f"{top}/{under}", f"{'-' if top < 0 else ''}\\frac{{{abs(top)}}}{{{under}}}"]
    return made if under > 1 else [*made, str(top), f"{top}.0", f"${top}$"]


@given(RATIONALS, RATIONALS, st.data())
def test_a_literal_verdict_is_arithmetic(left: Fraction, right: Fraction, data: st.DataObject) -> None:
    answer, gold = data.draw(st.sampled_from(spellings(left))), data.draw(st.sampled_from(spellings(right)))
    verdict = literal_verdict(answer, gold)
    assert verdict is None or verdict == (left == right)
    assert left != right or verdict is True


@pytest.mark.parametrize(
    "left", ["3", "-3", "1/2", "0.5", "\\frac{1}{2}", "\\dfrac{6}{4}", "1.5", "1,234", "1234", "007"]
)
@pytest.mark.parametrize("right", ["3", "7", "1/2", "\\frac{3}{2}", "1234", "-3"])
def test_the_fast_path_says_what_the_worker_says(left: str, right: str) -> None:
    verdict = literal_verdict(left, right)
    assert verdict is None or float(verdict) == compare_answer(left, right)[0]


@pytest.mark.parametrize(
    ("answer", "gold"), [("1/0", "1/0 "), ("0.333", "1/3"), ("x", "y"), ("3 or 4", "3"), ("", "3")]
)
def test_what_characters_do_not_decide_is_left_open(answer: str, gold: str) -> None:
    assert literal_verdict(answer, gold) is None


def test_huge_numbers_are_left_open() -> None:
    assert literal_verdict("9" * 5000, "3") is None
