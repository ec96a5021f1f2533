"""Times, dates, scores and ranges are one answer: no part, no difference and no other order of them is right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.rewards.gold import read_gold, verifies_itself
from tests.rewards.verdicts import right

END = st.integers(1, 400)
HOUR, MINUTE = st.integers(1, 12), st.integers(0, 59)
RANGES = st.sampled_from(
    ["{}-{}", "{} - {}", "{}–{}", "{} to {}", "{}\\text{{-}}{}", "{}\\text{{--}}{}", "{} \\text{{ to }} {}"]
)
BOXES = st.sampled_from(["\\boxed{{{}}}", "\\boxed{{\\text{{{}}}}}", "#### {}"])


@settings(max_examples=40)
@given(END, END, END, END, RANGES, st.sampled_from(["{}-{}", "{} to {}", "{} - {}"]))
def test_a_range_has_two_ends_in_their_order(low: int, high: int, other: int, last: int, shape: str, form: str) -> None:
    gold = form.format(low, high)
    assert read_gold(gold).kind == "span"
    assert right(f"\\boxed{{{shape.format(low, high)}}}", gold)
    assert right(f"\\boxed{{{shape.format(other, last)}}}", gold) == ((other, last) == (low, high))
    for part in (low, high, low - high, high - low, f"{low}, {high}", f"({low}, {high})"):
        assert not right(f"\\boxed{{{part}}}", gold)


@settings(max_examples=40)
@given(END, END, END, END)
def test_fractions_have_ranges_and_no_difference_is_one(top: int, under: int, over: int, below: int) -> None:
    gold = f"{top}/{under}-{over}/{below}"
    assert right(f"\\boxed{{{gold}}}", gold)
    assert right(f"\\boxed{{\\frac{{{top}}}{{{under}}}-\\frac{{{over}}}{{{below}}}}}", gold)
    assert not right(f"\\boxed{{\\frac{{{top * below - over * under}}}{{{under * below}}}}}", gold)


@settings(max_examples=40)
@given(HOUR, MINUTE, HOUR, MINUTE, st.sampled_from(["p.m.", "PM", "pm", "P.M."]), BOXES)
def test_a_time_is_its_hour_and_minute(hour: int, minute: int, other: int, last: int, half: str, box: str) -> None:
    gold = f"{hour}:{minute:02d} p.m."
    assert right(box.format(f"{hour}:{minute:02d} {half}"), gold)
    assert right(box.format(f"{hour:02d}:{minute:02d}"), gold)
    assert right(f"The train arrives at {hour}:{minute:02d} {half}", gold)
    assert right(box.format(f"{other}:{last:02d} {half}"), gold) == ((other, last) == (hour, minute))
    for wrong in (
        f"{hour}:{minute:02d} a.m.",
        str(hour),
        str(minute),
        f"{hour}{minute:02d}",
        f"{hour}:{minute:02d}:30",
    ):
        assert not right(box.format(wrong), gold)
    assert right(box.format(f"{hour} {half}"), f"{hour}:00 PM")
    assert not right(box.format(f"{hour} AM"), f"{hour} PM")


@given(st.dates(), st.dates(), st.sampled_from(["{0.year}-{0.month:02d}-{0.day:02d}", "{0.day}/{0.month}/{0.year}"]))
def test_a_date_is_its_numbers_in_their_order(day: object, other: object, form: str) -> None:
    gold, answer = form.format(day), form.format(other)
    assert right(f"\\boxed{{{gold}}}", gold)
    assert right(f"The date is {gold}.", gold)
    assert right(f"\\boxed{{{answer}}}", gold) == (day == other)
    assert not right(f"\\boxed{{{gold.rpartition('-' if '-' in gold else '/')[0]}}}", gold)


@pytest.mark.parametrize(
    "gold", ["3-2", "10 to 20", "10-20 minutes", "0.5-0.7", "5:30 p.m.", "5 PM", "2021-05-03", "5/3/2021"]
)
def test_such_a_gold_verifies_itself(gold: str) -> None:
    assert read_gold(gold).kind == "span"
    assert verifies_itself(gold) == 1.0
    assert right(f"\\boxed{{{gold}}}", gold)


@pytest.mark.parametrize(
    "gold", ["1/2", "-3", "3-x", "3-2\\sqrt{2}", "6-5i", "10^{-3}", "1e-6", "3:2", "May 3-5", "2-(-3)"]
)
def test_other_golds_with_such_signs_are_none(gold: str) -> None:
    assert read_gold(gold).kind != "span"
