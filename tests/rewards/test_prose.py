"""Sentences: the words around a value may deny or change it, and values in a row are a list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.rewards.math.extract import answer_of
from tests.rewards.verdicts import right

WHOLE = st.integers(2, 999)
FRAMES = st.sampled_from(["The answer is {}.", "So the total is {}.", "Therefore, the result equals {}."])
VALUES = st.sampled_from(["{}", "${}$", "exactly {}", "{} apples", "only {} of them"])
CHANGED = [
    "at least {}", "at most {}", "more than {}", "greater than {}", "about {}", "half of {}", "twice {}", "never {}",
    "definitely not {}", "anything but {}", "far from {}", "the square root of {}", "{} or more", "{} or so",
    "{} more than x", "{} squared", "{} thousand", "{} million", "{} dozen", "minus {}", "negative {}", "maybe {}",
    "unlikely to be {}", "unknown: {}", "between $1 and ${}", "not known to be {}", "{} divided by 2",
    "less than ${}$", "not ${}$",
]  # fmt: skip
JOINTS = st.sampled_from([", ", " or ", " and ", ", or ", "; "])


@given(FRAMES, VALUES, WHOLE, WHOLE)
def test_a_sentence_says_its_value(frame: str, value: str, number: int, gold: int) -> None:
    assert right(frame.format(value.format(number)), str(gold)) == (number == gold)


@pytest.mark.parametrize("changed", CHANGED)
@settings(max_examples=5)
@given(FRAMES, WHOLE)
def test_words_that_change_a_value_take_it_away(changed: str, frame: str, number: int) -> None:
    assert not right(frame.format(changed.format(number)), str(number))


@given(
    st.sampled_from(["Candidates: {}", "It is {}.", "It is either {}", "**{}**", "The values are {}."]), JOINTS, WHOLE
)
def test_values_in_a_row_are_a_list(frame: str, joint: str, number: int) -> None:
    response = frame.format(f"{number + 1}{joint}{number}")
    assert not right(response, str(number))
    assert right(response, f"{number}, {number + 1}")
    assert not right(response, f"{number}, {number + 2}")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The solutions are $x=1$, $x=2$ and $x=3$.", "x=1, x=2, x=3"),
        ("So $x = 1$ or $x = 2$.", "x = 1, x = 2"),
        ("$$41$$ or $$42$$", "41, 42"),
        ("where $x = 3$.\n$$\nx = 42\n$$", "x = 42"),
        ("She pays $17 and $18.", "17, 18"),
        ("She makes $18 and pays $2, so $16 are left.", "16"),
        ("For $x = 2$, $42$ ways remain.", "42"),
        ("She has 40 apples and then gets 2 more, so 42 in the end.", "42"),
        ("The train arrives at 5:30 p.m.", "5:30 p.m."),
        ("The final score is 3-2.", "3-2"),
        ("The date is 2021-05-03.", "2021-05-03"),
        ("It happened on 5/3/2021.", "5/3/2021"),
        ("The price is 3 million dollars.", "3 million"),
    ],
)
def test_what_the_last_line_says(response: str, answer: str) -> None:
    assert answer_of(response) == answer


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("It arrives at 5:30.", "30"),
        ("They won 3:2.", "2"),
        ("The score is 3-2.", "2"),
        ("It was on 5/3/2021.", "2021"),
    ],
)
def test_a_part_of_a_time_a_score_or_a_date_is_no_value(response: str, gold: str) -> None:
    assert not right(response, gold)


@pytest.mark.parametrize(
    ("response", "gold", "verdict"),
    [
        ("I choose C.", "C", True),
        ("We pick option (C).", "C", True),
        ("I do not choose C.", "C", False),
        ("I choose C or D.", "C", False),
        ("The answers are A and C.", "A, C", True),
        ("The answers are A and C.", "C", False),
    ],
)
def test_other_answer_phrases(response: str, gold: str, verdict: bool) -> None:
    assert right(response, gold) == verdict


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Final Answer: The area of $ABC$ is 120.", "120"),
        ("Final Answer: The length of $AB$ is 12 cm", "12 cm"),
        ("Answer: The value of $x^2 + 1$ is $\\frac{1}{2}$.", "$\\frac{1}{2}$"),
        ("Answer: The area of $ABC$ is not 120.", "The area of $ABC$ is not 120"),
        ("**Answer:**\n\n$$\n\\frac{3}{4}\n$$", "\\frac{3}{4}"),
        ("Answer:\n\\[\n x = 12 \n\\]\nas was shown", "x = 12"),
        ("She pays $5 a day, so with $x=3$ days it costs $15.", "$15"),
    ],
)
def test_a_value_at_a_sentences_end_a_display_and_an_amount(response: str, answer: str) -> None:
    assert answer_of(response).strip("$ ") == answer.strip("$ ")
    assert right(response, "120" if "not" in answer else answer.removesuffix(" cm")) is ("not" not in answer)
