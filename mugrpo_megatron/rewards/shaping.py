"""Reward shaping on top of the verdict: an overlong penalty, off by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mugrpo_megatron.recipe.scoring import OVERLONG, RewardSection
from mugrpo_megatron.rewards.items import Score


def shaped(score: Score, tokens: int, max_tokens: int, section: RewardSection) -> Score:
    """The score that training uses; reported accuracy uses the verdict alone.

    The penalty is one of the components, between 0 and 1. `tokens`: of the response, of at most `max_tokens`.
    """
    if not section.overlong_buffer_tokens:
        return score
    penalty = overlong(tokens, max_tokens, section.overlong_buffer_tokens)
    return replace(score, reward=score.reward - penalty, components={**score.components, OVERLONG: penalty})


def verdict_in(reward: float, components: Mapping[str, float]) -> float:
    """The verdict in a shaped reward: what the reward function gave, where the penalty was taken from a single one."""
    verdicts = [value for name, value in components.items() if name != OVERLONG and "." not in name]
    return verdicts[0] if len(verdicts) == 1 and OVERLONG in components else reward


def overlong(tokens: int, max_tokens: int, buffer: int) -> float:
    """0 up to `max_tokens - buffer`, then linear up to 1 at `max_tokens` (Yu et al. 2025, DAPO, equation 13)."""
    return min(1.0, max(0.0, (tokens - (max_tokens - buffer)) / buffer))
