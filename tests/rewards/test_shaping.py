from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Score
from mugrpo_megatron.rewards.shaping import overlong, shaped
from mugrpo_megatron.rewards.worker import well_formed


def test_nothing_is_added_by_default() -> None:
    score = Score(1.0, "", "", 0.0, components={"math": 1.0})
    assert shaped(score, 100, 100, RewardSection()) == score


def test_format_and_length_add_up_and_are_components() -> None:
    section = RewardSection(format_weight=0.25, overlong_buffer_tokens=40)
    score = shaped(Score(1.0, "", "", 0.0, True, {"math": 1.0}), 80, 100, section)
    assert score.reward == pytest.approx(1.0 + 0.25 - 0.5)
    assert score.components == {"math": 1.0, "format": 1.0, "overlong": 0.5}
    assert shaped(Score(0.0, "", "", 0.0, False), 60, 100, section).reward == 0.0


@given(st.integers(0, 200), st.integers(1, 100))
def test_overlong_rises_from_the_buffer_to_the_limit(tokens: int, buffer: int) -> None:
    penalty = overlong(tokens, 100, buffer)
    assert 0.0 <= penalty <= overlong(tokens + 1, 100, buffer) <= 1.0
    assert (penalty == 0.0) == (tokens <= 100 - buffer)
    assert (penalty == 1.0) == (tokens >= 100)


def test_form_means_exactly_once() -> None:
    assert [well_formed(text, "a+b", 1.0) for text in ("", "aab", "ab ab")] == [False, True, False]


def test_a_pattern_that_does_not_compile_is_found_in_the_recipe() -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        RewardSection(format_pattern="(")


@pytest.mark.parametrize("seconds", [math.inf, 1e30, math.nan, 0.0, -1.0])
def test_a_time_limit_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        RewardSection(timeout_s=seconds)
