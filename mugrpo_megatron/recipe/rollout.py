"""The `[rollout]` section: how responses are sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from mugrpo_megatron.recipe.objective import Section

MOST_KEPT = 64
"""Largest top-k whose tokens a stage keeps: 4 bytes each for every token."""


class RolloutSection(Section):
    """How the responses of an update are sampled."""

    prompts_per_update: PositiveInt = 32
    """Problems whose responses make up one optimizer update."""
    responses_per_prompt: int = Field(8, ge=2)
    """G: responses sampled for each problem; the group that the advantage is relative to."""
    max_response_tokens: PositiveInt = 1024
    """A longer response is cut and finishes with reason `length`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner divides its logits by it too, so that ratios compare the same policies."""
    top_k: NonNegativeInt = 0
    """Sample only from this many most likely tokens; 0 is all. Up to 64 the stage stores them, and ratios are exact."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: below 1, ratios are exact with a `top_k` of at most 64, otherwise biased."""
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    """Sample no token below this share of the most likely token's probability; ratios are exact as with `top_p`."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response, besides the end-of-sequence token; the response includes them."""
    behaviour: Literal["engine", "learner"] = "engine"
    """Source of the behaviour logprobs: the engine (free) or a learner pass at the stage's start (ratio exactly 1)."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def replayed(self) -> int:
        """Tokens that the stage keeps for each place, so that the learner's softmax runs over the same; 0 for none."""
        return self.top_k if self.top_k <= MOST_KEPT else 0

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty text would end every response at once")
        return value
