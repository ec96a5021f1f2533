"""Spellings: wrappers, labels and names around an answer do not change it, and what they hide is not dropped."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.rewards.math.normalize import normalize
from tests.rewards.verdicts import right

WHOLE = st.integers(2, 999)
AROUND = [
    "\\mathbf{{{}}}", "\\textbf{{{}}}\\text{{ apples}}", "\\left({}\\right)", "\\displaystyle {}", "\\,{}\\,",
    "\\text{{Total: }} {}", "\\text{{Total: {}}}", "\\text{{Total cost: }} \\${}", "\\text{{The answer is }} {}",
    "\\text{{The answer is {}}}", "\\text{{Answer: {}}}", "Number of ways: {}", "x = {}", "{} = x",
    "\\text{{Least value of }} n = {}", "\\text{{No. of ways}} = {}",
]  # fmt: skip
HEDGING = [
    "\\text{{if }} x = {}", "if x = {}", "\\text{{If }} x = {}", "\\text{{maybe }} x = {}",
    "\\text{{suppose }} x = {}", "\\text{{wrong answer}} = {}", "\\text{{not }} x = {}", "\\text{{Not: }} {}",
    "\\text{{at least: }} {}", "{}...", "{}…", "{}..", "\\text{{The answer is not {}}}",
    "\\text{{The answer is at least {}}}", "\\text{{Total: at least {}}}", "unless = {}", "I do not know: {}",
    "It is more than: {}", "\\text{{unknown: }} {}", "x \\not= {}",
]  # fmt: skip


@pytest.mark.parametrize("form", AROUND)
@settings(max_examples=5)
@given(WHOLE, WHOLE)
def test_labels_and_wrappers_leave_the_value(form: str, value: int, gold: int) -> None:
    assert right(f"\\boxed{{{form.format(value)}}}", str(gold)) == (value == gold)


@pytest.mark.parametrize("form", HEDGING)
@settings(max_examples=5)
@given(WHOLE)
def test_labels_that_do_not_commit_take_it_away(form: str, value: int) -> None:
    assert not right(f"\\boxed{{{form.format(value)}}}", str(value))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_fraction_takes_one_digit_each_without_braces(top: int, under: int, other: int, last: int) -> None:
    """As in TeX, where an undelimited argument is one token (The TeXbook, chapter 20)."""
    gold = f"\\frac{{{top}}}{{{under}}}"
    for form in (
        f"\\frac {other} {last}",
        f"\\frac {other}{last}",
        f"\\frac{{\\mathbf{{{other}}}}}{{\\mathbf{{{last}}}}}",
    ):
        assert right(f"\\boxed{{{form}}}", gold) == (other * under == top * last)


@given(st.integers(1, 9), st.integers(1, 9))
def test_styled_digits_side_by_side_are_not_read(one: int, other: int) -> None:
    for form in (f"{one}\\text{{{other}}}", f"\\mathbf{{{one}}}\\mathbf{{{other}}}"):
        assert not right(f"\\boxed{{{form}}}", str(one * other))


@given(st.integers(2, 9), st.sampled_from([("²", 2), ("³", 3)]), st.integers(1, 9))
def test_a_raised_digit_is_a_power(base: int, power: tuple[str, int], behind: int) -> None:
    sign, exponent = power
    assert right(f"\\boxed{{{base}{sign}}}", str(base**exponent))
    assert right(f"\\boxed{{x{sign}}}", f"x^{exponent}")
    assert not right(f"\\boxed{{{base}{sign}}}", f"{base}{exponent}")
    assert not right(f"\\boxed{{{base}{sign}{behind}}}", str(base ** (10 * exponent + behind)))


@pytest.mark.parametrize(("text", "plain"), [("0.333...", "0.333"), ("42.", "42"), ("42...", "42\\ldots")])
def test_dots_behind_decimals_only_say_that_there_are_more(text: str, plain: str) -> None:
    assert normalize(text) == plain


@given(st.permutations([1, 2, 3]))
def test_angle_brackets_keep_the_order_and_a_set_has_none(numbers: list[int]) -> None:
    listed = ", ".join(map(str, numbers))
    assert right(f"\\boxed{{\\langle {listed} \\rangle}}", "(1, 2, 3)") == (numbers == [1, 2, 3])
    assert right(f"\\boxed{{\\lbrace {listed} \\rbrace}}", "\\{1, 2, 3\\}")
    assert not right(f"\\boxed{{\\{{{listed}\\}}}}", "(1, 2, 3)")
    assert not right(f"\\boxed{{({listed})}}", "\\{1, 2, 3\\}")


@given(st.permutations([1, 2, 3]))
def test_values_without_the_names_of_the_gold_have_its_order(numbers: list[int]) -> None:
    gold = "x = 1, y = 2, z = 3"
    names = dict(zip("xyz", (1, 2, 3), strict=True))
    for answer in (", ".join(map(str, numbers)), ", ".join(f"{n} = {v}" for n, v in zip("uvw", numbers, strict=True))):
        assert right(f"\\boxed{{{answer}}}", gold) == (numbers == [1, 2, 3])
    shuffled = [(name, value) for value in numbers for name, own in names.items() if own == value]
    assert right(f"\\boxed{{{', '.join(f'{name} = {value}' for name, value in shuffled)}}}", gold)
    assert right(f"\\boxed{{{', '.join(map(str, numbers))}}}", "x = 1, x = 2, x = 3")


@given(st.permutations([("x", 1), ("y", 2)]), st.booleans())
def test_a_tuple_takes_named_values_by_their_letters(pairs: list[tuple[str, int]], swapped: bool) -> None:
    named = ", ".join(f"{name} = {3 - value if swapped else value}" for name, value in pairs)
    assert right(f"\\boxed{{{named}}}", "(1, 2)") != swapped
    assert right("\\boxed{(1, 2)}", named) != swapped
