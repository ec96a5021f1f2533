from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.shaping import is_well_formed, overlong, shaped


def test_nothing_is_added_by_default() -> None:
    assert shaped(1.0, "no box", 100, 100, RewardSection()) == 1.0


def test_format_and_length_add_up() -> None:
    section = RewardSection(format_weight=0.25, overlong_buffer_tokens=40, overlong_penalty=0.5)
    assert shaped(1.0, "\\boxed{1}", 80, 100, section) == pytest.approx(1.0 + 0.25 - 0.5 * 0.5)
    assert shaped(0.0, "\\boxed{1} \\boxed{1}", 60, 100, section) == 0.0


@given(st.integers(0, 200), st.integers(1, 100))
def test_overlong_rises_from_the_buffer_to_the_limit(tokens: int, buffer: int) -> None:
    penalty = overlong(tokens, 100, buffer)
    assert 0.0 <= penalty <= overlong(tokens + 1, 100, buffer) <= 1.0
    assert (penalty == 0.0) == (tokens <= 100 - buffer)
    assert (penalty == 1.0) == (tokens >= 100)


def test_form_means_exactly_once() -> None:
    assert [is_well_formed(text, "a+b") for text in ("", "aab", "ab ab")] == [False, True, False]
