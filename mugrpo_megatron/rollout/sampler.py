"""The recipe's sampling parameters."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rollout.wire import Sampling


def sampling(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How training responses are sampled."""
    rollout = recipe.rollout
    return Sampling(rollout.temperature, rollout.top_p, rollout.max_response_tokens, _stop_ids(tokenizer))


def held_out_sampling(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, name: str) -> Sampling:
    """How evaluation samples the held-out set `name`; temperature 0 is greedy."""
    own = recipe.eval.of(name)
    limit = own.max_tokens or recipe.rollout.max_response_tokens
    return Sampling(own.temperature, own.top_p, limit, _stop_ids(tokenizer))


def _stop_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence token; the engine adds those of config.json and generation_config.json."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
