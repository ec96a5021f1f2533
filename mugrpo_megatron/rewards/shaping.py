"""Reward shaping on top of the verdict: a format reward and an overlong penalty. Off by default."""

from __future__ import annotations

import re

from mugrpo_megatron.recipe.scoring import RewardSection


def shaped(reward: float, response: str, tokens: int, max_tokens: int, section: RewardSection) -> float:
    """The reward that training uses; reported accuracy uses the verdict alone.

    Args:
        reward: the verdict, as `Score.reward`.
        tokens: response tokens, of at most `max_tokens`.
    """
    if section.format_weight:
        reward += section.format_weight * is_well_formed(response, section.format_pattern)
    if section.overlong_buffer_tokens:
        reward -= section.overlong_penalty * overlong(tokens, max_tokens, section.overlong_buffer_tokens)
    return reward


def is_well_formed(response: str, pattern: str) -> bool:
    """Whether the pattern occurs exactly once: a second box, or a repeated answer, does not count."""
    return sum(1 for _ in re.finditer(pattern, response)) == 1


def overlong(tokens: int, max_tokens: int, buffer: int) -> float:
    """0 up to `max_tokens - buffer`, then linear up to 1 at `max_tokens` (Yu et al. 2025, DAPO, equation 13)."""
    return min(1.0, max(0.0, (tokens - (max_tokens - buffer)) / buffer))
