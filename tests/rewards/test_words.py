"""Golds of words, with and without numbers, and the golds beside them that are quantities, lists or sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.math.compare import compare_answer
from mugrpo_megatron.rewards.math.extract import answer_of
from mugrpo_megatron.rewards.math.gold import read_gold, verifies_itself
from mugrpo_megatron.rewards.math.literal import is_text, is_words
from tests.rewards.verdicts import right

NAMES = st.sampled_from(["Apollo", "Gemini", "World War", "Room", "Boeing", "iPhone", "Psalm", "Chapter"])
MONTHS = st.sampled_from(["January", "March", "May", "June", "December"])


@given(NAMES, st.integers(0, 2000), NAMES, st.integers(0, 2000))
def test_both_the_words_and_the_number_must_agree(name: str, number: int, other: str, another: int) -> None:
    gold, answer = f"{name} {number}", f"{other} {another}"
    same = (name, number) == (other, another)
    for response in (
        f"\\boxed{{{answer}}}",
        f"\\boxed{{\\text{{{answer}}}}}",
        f"The answer is {answer}.",
        answer.upper(),
    ):
        assert right(response, gold) == same
        assert right(response, f"\\text{{{gold}}}") == same
    assert not right(f"\\boxed{{{number}}}", gold)
    assert not right(f"The answer is {number}.", gold)
    assert not right(name, gold)


@given(MONTHS, st.integers(1, 31), st.integers(1900, 2100), MONTHS, st.integers(1, 31))
def test_a_date_is_its_day_month_and_year(month: str, day: int, year: int, other: str, another: int) -> None:
    for gold, answer in (
        (f"{month} {day}", f"{other} {another}"),
        (f"{month} {day}, {year}", f"{other} {another} {year}"),
        (f"{day} {month} {year}", f"{another} {other} {year}"),
    ):
        assert right(f"\\boxed{{{gold}}}", gold)
        assert right(f"\\boxed{{{answer}}}", gold) == ((other, another) == (month, day))
        assert not right(f"\\boxed{{{day}}}", gold)
        assert not right(f"\\boxed{{{month}}}", gold)


RIGHT = [
    ("\\boxed{apollo 11}", "Apollo 11"),
    ("\\boxed{\\text{Apollo } 11}", "Apollo 11"),
    ("\\boxed{\\textbf{Apollo}~11}", "Apollo 11"),
    ("The answer is **Apollo 11**.", "Apollo 11"),
    ("The answer is $\\text{Apollo 11}$, since it landed.", "Apollo 11"),
    ("#### Apollo 11", "Apollo 11"),
    ("Apollo 11", "The answer is Apollo 11."),
    ("Apollo 11", "Apollo $11$"),
    ("Apollo 11", "\\boxed{Apollo 11}"),
    ("\\boxed{type 2 Diabetes}", "Type 2 diabetes"),
    ("\\boxed{39 steps}", "The 39 Steps"),
    ("\\boxed{Oceans 11}", "Ocean's 11"),
    ("\\boxed{Henry 4 and Louis 14}", "Henry 4, Louis 14"),
    ("\\boxed{\\text{line } 3}", "\\text{Line } 3"),
    ("\\boxed{Bob = 6, Alice = 5}", "Alice = 5, Bob = 6"),
    ("\\boxed{m = 3, n = 5}", "n = 5 and m = 3"),
    ("\\boxed{No solution}", "no solution"),
    ("Paris", "The capital is $\\text{Paris}$."),
    ("The answer is all real numbers except 0.", "all real numbers except $0$"),
    ("The answer is 3 out of 5.", "3 out of 5"),
]
WRONG = [
    ("The answer is Gemini 11.", "Apollo 11"),
    ("\\boxed{Apollo 11 or Apollo 12}", "Apollo 11"),
    ("\\boxed{Apollo 11, Apollo 12}", "Apollo 11"),
    ("\\boxed{not Apollo 11}", "Apollo 11"),
    ("\\boxed{Apollo 11?}", "Apollo 11"),
    ("\\boxed{Apollo 1.1}", "Apollo 11"),
    ("\\boxed{Apollo -11}", "Apollo 11"),
    ("\\boxed{11 Apollo}", "Apollo 11"),
    ("\\boxed{2}", "Type 2 diabetes"),
    ("\\boxed{Type 1 diabetes}", "Type 2 diabetes"),
    ("\\boxed{3, 2021}", "May 3, 2021"),
    ("\\boxed{\\text{Jnue 20}}", "\\text{June 20}"),
    ("\\boxed{May 5 to June 3}", "May 3 to June 5"),
    ("\\boxed{Henry 14, Louis 4}", "Henry 4, Louis 14"),
    ("\\boxed{5, 3}", "5 more than 3"),
    ("\\boxed{5}", "Alice = 5, Bob = 6"),
    ("\\boxed{n = 3, m = 5}", "n = 5 and m = 3"),
    ("\\boxed{0}", "All real numbers except 0"),
    ("\\boxed{2}", "log 2"),
    ("\\boxed{5}", "all x such that x > 5"),
]


@pytest.mark.parametrize(("response", "gold"), RIGHT)
def test_case_punctuation_and_style_are_no_difference(response: str, gold: str) -> None:
    assert right(response, gold)


@pytest.mark.parametrize(("response", "gold"), WRONG)
def test_other_words_or_numbers_are_refused(response: str, gold: str) -> None:
    assert not right(response, gold)
    assert compare_answer(answer_of(response), gold)[0] == 0.0


QUANTITIES = [
    ("42", ("42 apples", "$42", "42 \\%", "x = 42", "42 cm", "\\text{42 units}", "42 (forty-two)", "42 ways to do it")),
    ("42", ("the answer is 42", "Answer: 42 apples", "Total: 42 dollars", "There are 42 ways.", "The sum is $42$.")),
    ("42", ("about 42", "Thus, $x = 42$", "She has 42 apples left.", "42 because 6 times 7 is 42")),
    ("1234", ("1,234", "1,234 students", "The answer is 1,234.")),
    ("0.75", ("3/4 cup", "3/4 of a cup", "\\frac{3}{4} \\text{ hours}")),
    (
        "2, 3",
        ("2 and 3", "2 or 3", "$x=2$ or $x=3$", "2 cm and 3 cm", "2 apples and 3 pears", "The roots are $2$ and $3$"),
    ),
]


@pytest.mark.parametrize(("value", "gold"), [(value, gold) for value, golds in QUANTITIES for gold in golds])
def test_quantities_lists_and_sentences_are_no_words(value: str, gold: str) -> None:
    assert read_gold(gold).kind in ("number", "other")
    assert right(f"\\boxed{{{value}}}", gold)
    assert right(f"The answer is {value}.", gold)
    assert not right(f"\\boxed{{{value}1}}", gold)


@pytest.mark.parametrize("gold", ["3 hours 20 minutes", "5:30", "5:30 p.m.", "3-2", "2021-05-03", "5/3/2021"])
def test_several_units_a_time_a_date_or_a_score_are_one_answer(gold: str) -> None:
    assert right(f"\\boxed{{{gold}}}", gold)
    for answer in ("3", "2", "5", "1/6", "1", "20", "3 minutes 20 hours", "5:31", "3-1", "2013", "5:3"):
        assert not right(f"\\boxed{{{answer}}}", gold)


@pytest.mark.parametrize("gold", ["x + abc", "sin 30", "\\sqrt{abc}", "f(2) max", "x^2 even", "5", ""])
def test_formulas_are_no_words(gold: str) -> None:
    assert not is_words(gold)


@given(st.text(st.sampled_from("Ab1 2,.-':(cde$\\{}"), min_size=1, max_size=20))
def test_a_gold_of_words_verifies_itself(gold: str) -> None:
    if is_text(gold) and read_gold(gold).kind in ("words", "choice"):
        assert verifies_itself(gold) == 1.0
        assert compare_answer(read_gold(gold).text, gold)[0] == 1.0


@pytest.mark.parametrize("name", ["math500", "gsm8k_test", "aime24", "aime25", "amc23"])
def test_no_formula_or_number_of_real_sets_is_words(shared_data: Path, name: str) -> None:
    golds = [json.loads(line)["answer"] for line in (shared_data / f"{name}.jsonl").read_text().splitlines()]
    words = {gold for gold in golds if read_gold(gold).kind == "words"}
    assert words == {gold for gold in golds if gold.startswith("\\text{") and gold[6].isalpha() and "," not in gold}
    assert all(is_text(gold) for gold in words)


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        ("The train travels 60 miles per hour", "60"),
        ("She walked 5 km", "5"),
        ("He made $18 a day", "18"),
        ("The ship can carry 30 people", "30"),
        ("She sold 72", "72"),
        ("Rs 10", "10"),
        ("USD 10", "10"),
        ("a total of 10", "10"),
    ],
)
def test_a_sentence_with_a_verb_before_its_number_is_the_number(gold: str, number: str) -> None:
    assert (read_gold(gold).kind, read_gold(gold).text) == ("number", number)


@pytest.mark.parametrize(
    "gold", ["type 2 diabetes", "chronic type 2 diabetes", "World War 2 ended", "May 5", "Windows 95"]
)
def test_a_name_with_a_number_is_no_sentence(gold: str) -> None:
    assert read_gold(gold).kind == "words"
