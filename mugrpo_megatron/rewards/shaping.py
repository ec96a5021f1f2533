"""Reward shaping on top of the verdict: a format reward and an overlong penalty. Off by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Score

FORMAT, OVERLONG = "format", "overlong"
"""Names of the terms among `Score.components`."""


def shaped(score: Score, tokens: int, max_tokens: int, section: RewardSection) -> Score:
    """The score that training uses; reported accuracy uses the verdict alone.

    Each term that the recipe asks for is one of the components, between 0 and 1.

    Args:
        score: the verdict, from a verifier with the same `section`.
        tokens: response tokens, of at most `max_tokens`.
    """
    reward, terms = score.reward, {}
    if score.well_formed is not None:
        terms[FORMAT] = float(score.well_formed)
        reward += section.format_weight * terms[FORMAT]
    if section.overlong_buffer_tokens:
        terms[OVERLONG] = overlong(tokens, max_tokens, section.overlong_buffer_tokens)
        reward -= terms[OVERLONG]
    return replace(score, reward=reward, components={**score.components, **terms}) if terms else score


def verdict_in(reward: float, components: Mapping[str, float]) -> float:
    """The verdict in a shaped reward: what the reward function gave, where shaping was added to a single one."""
    verdicts = [value for name, value in components.items() if name not in (FORMAT, OVERLONG) and "." not in name]
    terms = not components.keys().isdisjoint((FORMAT, OVERLONG))
    return verdicts[0] if len(verdicts) == 1 and terms else reward


def overlong(tokens: int, max_tokens: int, buffer: int) -> float:
    """0 up to `max_tokens - buffer`, then linear up to 1 at `max_tokens` (Yu et al. 2025, DAPO, equation 13)."""
    return min(1.0, max(0.0, (tokens - (max_tokens - buffer)) / buffer))
