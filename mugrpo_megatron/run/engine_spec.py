"""Takes the settings of a run's engines from its recipe."""

from __future__ import annotations

from typing import Any

from mugrpo_megatron.engine.launch import EngineSpec
from mugrpo_megatron.recipe import Recipe


def engine_spec(recipe: Recipe) -> EngineSpec:
    return EngineSpec(
        section=recipe.engine,
        dtype=recipe.model.dtype,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        max_response_tokens=recipe.longest_response,
        seed=recipe.run.seed,
        deterministic=recipe.run.deterministic,
        needs_tokenizer=bool(recipe.rollout.stop or recipe.rollout.episodes),
        returns_routes=recipe.learner.routing_replay == "rollout",
        episodes=(lambda engine: _episodes(recipe, engine)) if recipe.rollout.episodes else None,
    )


def _episodes(recipe: Recipe, engine: Any) -> Any:
    """Make the object that lets a user's function or program play an episode for each response of `engine`."""
    from mugrpo_megatron.extras.episodes.episodes import Episodes

    return Episodes(recipe, engine)
