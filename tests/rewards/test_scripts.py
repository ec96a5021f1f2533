"""Digits of every script have their value, and no other sign has one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.extract import in_ascii_digits
from tests.rewards.verdicts import right

ZEROS = st.sampled_from(["٠", "۰", "०", "০", "๐", "０"])
WHOLE = st.integers(0, 10**6)
FORMS = st.sampled_from(["{}", "\\boxed{{{}}}", "The answer is {}.", "#### {}", "<answer>{}</answer>", "答案是{}。"])


def written(value: int, zero: str) -> str:
    return "".join(chr(ord(zero) + int(digit)) for digit in str(value))


@given(WHOLE, WHOLE, ZEROS, FORMS)
def test_a_number_has_one_value_in_every_script(value: int, other: int, zero: str, form: str) -> None:
    assert right(form.format(written(value, zero)), str(value))
    assert right(form.format(value), written(value, zero))
    assert right(form.format(written(other, zero)), str(value)) == (other == value)


@given(st.text(max_size=50))
def test_translation_is_idempotent_and_leaves_ascii_alone(text: str) -> None:
    once = in_ascii_digits(text)
    assert in_ascii_digits(once) == once
    assert not text.isascii() or once == text


@pytest.mark.parametrize(
    ("text", "plain"), [("３．５", "3.5"), ("１，２３４", "1,234"), ("١٫٥", "1.5"), ("－４", "-4")]
)
def test_signs_between_digits(text: str, plain: str) -> None:
    assert in_ascii_digits(text) == plain


@pytest.mark.parametrize("text", ["④②", "42⁰", "Ⅻ", "四十二", "½", "42万"])
def test_other_signs_for_numbers_are_no_digits(text: str) -> None:
    assert in_ascii_digits(text) == text
    assert not right(f"\\boxed{{{text}}}", "42")


@pytest.mark.parametrize(
    ("response", "gold"),
    [("答案：C", "C"), ("答案是北京。", "北京"), ("Ответ: Москва", "Москва"), ("\\boxed{да}", "да")],
)
def test_phrases_and_words_of_other_languages(response: str, gold: str) -> None:
    assert right(response, gold)


@pytest.mark.parametrize(
    ("response", "gold"),
    [("答案不是42。", "42"), ("答案是41或42。", "42"), ("答案是北京或南京。", "北京"), ("41、42", "42")],
)
def test_hedges_of_other_languages(response: str, gold: str) -> None:
    assert not right(response, gold)
