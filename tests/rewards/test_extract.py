"""The answer in a response, in each mode of `reward.extract`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.prompts import INSTRUCTION, STYLES
from mugrpo_megatron.recipe.scoring import STYLES_WITHOUT_BOX, RewardSection
from mugrpo_megatron.recipe.sections import Recipe
from mugrpo_megatron.rewards.math.characters import plain_characters
from mugrpo_megatron.rewards.math.extract import answer_of
from mugrpo_megatron.rewards.math.literal import match_literally


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("933", "933"),
        (" -7\n", "-7"),
        ("So \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("final answer is $4$, no, it is \\boxed{3}", "3"),
        ("\\boxed{4} was wrong. It is \\boxed{3}", "3"),
        ("\\boxed{1} and \\boxed{2}", "1, 2"),
        ("$\\boxed{k = 45} \\quad \\text{and} \\quad \\boxed{n = 2}$", "k = 45, n = 2"),
        ("\\boxed{3} unfinished \\boxed{4", "3"),
        ("\\boxed{\\boxed{3}}", "\\boxed{3}"),
        ("\\boxed{4 \\boxed{3}", "3"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\fbox{3} }", "3"),
        ("reasoning\n#### 42", "42"),
        ("The answer is 0.5.", "0.5"),
        ("The answer is 3 or 4", "3, 4"),
        ("She pays 3 times, so it costs 18 dollars per day", "18"),
        ("We get $x$ and then $\\frac{1}{2}$ in the end", "\\frac{1}{2}"),
        ("", ""),
        ("\\boxed{}", ""),
    ],
)
def test_where_the_answer_stands(response: str, answer: str) -> None:
    assert answer_of(response) == answer


PIECES = st.sampled_from(
    ["answer is ", "\\boxed{", "}", "$", "#### ", "7", "x = ", ", ", " and ", "\n", ". ", "**", "<b>", "Yes"]
)


@given(st.text(max_size=300) | st.lists(PIECES | st.text(max_size=8), max_size=20).map("".join))
def test_an_answer_is_made_of_what_the_response_says(text: str) -> None:
    said = plain_characters(text, scripts=False)  # an answer has one spelling for characters that mean the same
    for part in answer_of(text).split(", "):
        if any(mark in text for mark in "*_`~=<#"):  # markup between the characters of an answer is left out
            left = iter(said)
            assert all(character in left for character in part)
        else:
            assert part in said


TABLE = [
    ("so \\boxed{7}", "7", "7", "7"),
    ("so \\fbox{7}", "7", "7", "7"),
    ("\\boxed{7}, checked with 8", "7", "7", "8"),
    ("7", "", "7", "7"),
    ("The answer is 7.", "", "7", "7"),
    ("work\n#### 7", "", "7", "7"),
    ("There are 7 ways to do it.", "", "7", "7"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "\\frac{1}{2}", "2"),
    ("no idea", "", "no idea", ""),
]
"""Response; answer for `boxed`, `final`, `last_number`. The page about the verifier shows these rows."""


@pytest.mark.parametrize(("response", "boxed", "final", "last_number"), TABLE)
def test_each_mode_takes_its_part(response: str, boxed: str, final: str, last_number: str) -> None:
    assert [answer_of(response, mode) for mode in ("boxed", "final", "last_number")] == [boxed, final, last_number]
    assert answer_of(response) == answer_of(response, "auto") == final


@given(st.text(max_size=200))
def test_without_a_box_the_strict_mode_finds_nothing(text: str) -> None:
    if "box" not in text:
        assert answer_of(text, "boxed") == ""


def test_the_verifier_obeys_the_recipe() -> None:
    scores = {mode: match_literally("The answer is 7", "7", RewardSection(extract=mode)) for mode in ("boxed", "final")}
    assert {mode: getattr(score, "reward", None) for mode, score in scores.items()} == {"boxed": 0.0, "final": 1.0}


@pytest.mark.parametrize("style", ["chat", *STYLES])
def test_a_prompt_that_asks_for_a_box_makes_it_the_default(style: str) -> None:
    asks = INSTRUCTION.split("{}")[0] in STYLES.get(style, "")
    assert asks == (style not in STYLES_WITHOUT_BOX)
    given = {"data": {"prompt_style": style}}
    assert Recipe.model_validate(given).reward.extract == ("boxed" if asks else "auto")
    for chosen in ("final", "last_number", "boxed"):
        assert Recipe.model_validate(given | {"reward": {"extract": chosen}}).reward.extract == chosen
    assert Recipe.model_validate(Recipe.model_validate(given).model_dump()) == Recipe.model_validate(given)
