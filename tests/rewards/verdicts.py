"""Scores a response as training does: the caller's part, then the worker's."""

from __future__ import annotations

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Verdict
from mugrpo_megatron.rewards.math.compare import compare_answer
from mugrpo_megatron.rewards.math.extract import Extract
from mugrpo_megatron.rewards.math.literal import match_literally


def right(response: str, gold: str, extract: Extract = "final") -> bool:
    """Whether a response scores 1."""
    settled = match_literally(response, gold, RewardSection(extract=extract))
    return (settled.reward if isinstance(settled, Verdict) else compare_answer(settled, gold)[0]) == 1.0
