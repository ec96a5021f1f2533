"""Reward shaping on top of the verdict: a format reward and an overlong penalty. Off by default."""

from __future__ import annotations

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.scores import Score


def shaped(score: Score, tokens: int, max_tokens: int, section: RewardSection) -> float:
    """The reward that training uses; reported accuracy uses the verdict alone.

    Args:
        score: the verdict, from a verifier with the same `section`.
        tokens: response tokens, of at most `max_tokens`.
    """
    reward = score.reward
    if score.well_formed:
        reward += section.format_weight
    if section.overlong_buffer_tokens:
        reward -= section.overlong_penalty * overlong(tokens, max_tokens, section.overlong_buffer_tokens)
    return reward


def overlong(tokens: int, max_tokens: int, buffer: int) -> float:
    """0 up to `max_tokens - buffer`, then linear up to 1 at `max_tokens` (Yu et al. 2025, DAPO, equation 13)."""
    return min(1.0, max(0.0, (tokens - (max_tokens - buffer)) / buffer))
