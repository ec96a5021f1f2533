"""Multiple choice: what chooses a letter, and what chooses none."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.math.compare import compare_answer
from mugrpo_megatron.rewards.math.extract import answer_of
from mugrpo_megatron.rewards.math.gold import read_gold
from mugrpo_megatron.rewards.math.literal import chosen_letter, letter_of, match_literally
from tests.rewards.verdicts import right

LETTERS = st.sampled_from("ABCDE")
TEXTS = st.sampled_from(
    ["", "Paris", "None of the above", "A house", "False", "not enough data", "X-rays", "George W. Bush", "12", "(1,2)"]
)

RIGHT = [
    ("The correct answer is (C) Paris.", "C"),
    ("Answer: (C) None of the above", "C"),
    ("Answer: C) Paris", "C"),
    ("\\boxed{\\text{(C) Paris}}", "C"),
    ("The correct answer is option C.", "C"),
    ("The answer is choice B.", "B"),
    ("\\boxed{\\text{Option B}}", "B"),
    ("\\boxed{\\text{Option } B}", "B"),
    ("The correct option is **(B)**.", "B"),
    ("The answer is option (C) Paris.", "C"),
    ("Option C is correct.", "C"),
    ("The answer is therefore $C$.", "C"),
    ("(C)", "Option C"),
    ("\\boxed{C}", "\\text{(C)}"),
]
NONE = ["(C) (B)", "C) B", "C or D", "(C), (D)", "C) or D)", "C. D", "C: D", "C. or D.", "C B", "ABC", "Cat", "(C)D"]
NONE += [
    "(C) Paris (D) Rome", "C) Paris D) Rome", "Option C or option D", "options C and D", "(C) option D",
    "(C) (or D)",
]  # fmt: skip
NONE += [
    "(C) Paris or D", "(C) wait D", "(C) Actually, it is D", "either C or D", "not (C)", "not option C", "neither C",
]  # fmt: skip
NONE += [
    "(C) is wrong", "(C) is not correct", "(C) isn't right", "C is wrong", "option C is wrong", "(C) was incorrect",
]  # fmt: skip
NONE += [
    "(C) is clearly false",
    "(C) is not the right answer",
    "(C) cannot be true",
    "C) is eliminated",
]


@pytest.mark.parametrize(("response", "gold"), RIGHT)
def test_a_letter_is_chosen_however_it_is_written(response: str, gold: str) -> None:
    assert compare_answer(answer_of(response), gold) == (1.0, "equal")


@pytest.mark.parametrize("answer", NONE)
@pytest.mark.parametrize("form", ["{}", "\\boxed{{{}}}", "\\boxed{{\\text{{{}}}}}", "**{}**"])
def test_several_letters_or_a_rejected_one_choose_none(answer: str, form: str) -> None:
    response = form.format(answer)
    assert compare_answer(answer_of(response), "C")[0] == 0.0
    assert compare_answer(answer_of(response, text_gold=True), "C")[0] == 0.0


@given(LETTERS, LETTERS, TEXTS, st.sampled_from(["({}) ", "{}) ", "{}. ", "{}: ", "option {}: ", "Choice ({}) "]))
def test_the_text_behind_the_letter_does_not_count(letter: str, gold: str, text: str, label: str) -> None:
    answer = (label.format(letter) + text).strip()
    for response in (answer, f"\\boxed{{{answer}}}", f"\\boxed{{\\text{{{answer}}}}}"):
        assert compare_answer(response if response == answer else answer_of(response), gold)[0] == float(letter == gold)


@pytest.mark.parametrize("text", ["about 12 apples", "the year 1984", "$x = 5$ and $y = 2$", "no more than 3 of them"])
def test_numbers_behind_the_letter_are_not_the_answer(text: str) -> None:
    settled = match_literally(f"The answer is (C) {text}.", "C", RewardSection())
    assert isinstance(settled, str)
    assert compare_answer(settled, "C")[0] == 1.0
    assert compare_answer(settled, "D")[0] == 0.0


def test_a_letter_alone_is_a_choice() -> None:
    assert [letter_of(gold) for gold in ("C", "(C)", "Option C", "choice (C)")] == ["C"] * 4
    assert [letter_of(gold) for gold in ("c", "AB", "Options", "C) Paris", "3", "")] == [None] * 6
    assert chosen_letter("Paris") is None


def test_a_small_letter_alone_is_a_choice() -> None:
    assert [chosen_letter(answer) for answer in ("c", "(c)", "c)")] == ["C"] * 3
    assert [chosen_letter(answer) for answer in ("c d", "cat", "c, d", "a house", "ab")] == [None] * 5


@given(st.sets(LETTERS, min_size=2), st.sets(LETTERS, min_size=1), st.randoms())
def test_several_choices_are_a_set_of_letters(letters: set[str], others: set[str], shuffle: random.Random) -> None:
    gold = ", ".join(letters)
    assert read_gold(gold).kind == "choices"
    for answer in (letters, others):
        listed = shuffle.sample(sorted(answer), len(answer))
        forms = [
            ", ".join(listed),
            " and ".join(listed),
            "".join(listed),
            ", ".join(f"({one}) Paris" for one in listed),
        ]
        for form in [*forms, f"({', '.join(listed)})", f"\\text{{{', '.join(listed)}}}"]:
            assert (compare_answer(form, gold)[0] == 1.0) == (answer == letters), form


@pytest.mark.parametrize("gold", ["AC", "BD", "ABD", "ACEG"])
def test_options_side_by_side_are_a_list(gold: str) -> None:
    for form in (", ".join(gold), " and ".join(gold), ", ".join(f"({letter})" for letter in gold), gold):
        assert compare_answer(form, gold)[0] == 1.0, form
    for form in (", ".join(gold[:-1]), ", ".join(gold + "H"), f"{', '.join(gold)}, 5", f"not {', '.join(gold)}"):
        assert compare_answer(form, gold)[0] == 0.0, form


def test_circled_letters_are_options() -> None:
    for code in range(5):
        circled, letter = chr(0x24B6 + code), chr(ord("A") + code)
        assert right(f"The answer is {circled}", letter)
        assert right(chr(0x24D0 + code), letter)
        assert not right(circled, "G")


@pytest.mark.parametrize(
    "answer", ["A, not C", "A or C but not both", "A, C?", "A C B", "CAT", "A", "A, C, 5", "AC or B"]
)
def test_a_hedge_about_several_choices_gains_nothing(answer: str) -> None:
    assert compare_answer(answer, "A, C")[0] == 0.0
