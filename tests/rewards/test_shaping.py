from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Score
from mugrpo_megatron.rewards.shaping import overlong, shaped


def test_nothing_is_added_by_default() -> None:
    score = Score(1.0, "", "", 0.0, components={"math": 1.0})
    assert shaped(score, 100, 100, RewardSection()) == score


def test_length_takes_away_and_is_a_component() -> None:
    section = RewardSection(overlong_buffer_tokens=40)
    score = shaped(Score(1.0, "", "", 0.0, {"math": 1.0}), 80, 100, section)
    assert score.reward == 0.5
    assert score.components == {"math": 1.0, "overlong": 0.5}


@given(st.integers(0, 200), st.integers(1, 100))
def test_overlong_rises_from_the_buffer_to_the_limit(tokens: int, buffer: int) -> None:
    penalty = overlong(tokens, 100, buffer)
    assert 0.0 <= penalty <= overlong(tokens + 1, 100, buffer) <= 1.0
    assert (penalty == 0.0) == (tokens <= 100 - buffer)
    assert (penalty == 1.0) == (tokens >= 100)


@pytest.mark.parametrize("seconds", [math.inf, 1e30, math.nan, 0.0, -1.0])
def test_a_time_limit_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        RewardSection(timeout_s=seconds)
