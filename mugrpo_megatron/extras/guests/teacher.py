"""A teacher: the log-probabilities of the stage's own sampled tokens under another model with the same vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.extras.guests.models import teacher_recipe
from mugrpo_megatron.extras.guests.parts import Parts
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Problem, Prompt, Response, Sample
from mugrpo_megatron.stages.columns import LogprobColumn, logprob_table
from mugrpo_megatron.stages.store import StageStore

NOTHING = Problem("", "", "")
"""Stands for the problem of a prompt that is not sampled from."""


class Teacher:
    """Scores a stage for its column; a `scoring.Job`."""

    what = "teacher logprobs"

    def __init__(self, column: LogprobColumn, parts: Parts) -> None:
        self.column, self.parts = column, parts
        self.sampling = Sampling(1.0, 1.0, 1, ())
        """Nothing is sampled; the temperature is in the engine's arguments."""

    @staticmethod
    def recipe(recipe: Recipe, name: str, directory: Path) -> Recipe:
        return teacher_recipe(recipe, name, directory)

    def read(self, store: StageStore, update: int) -> list[Sample]:
        return store.read_update(update)

    def prompts(self, samples: Sequence[Sample]) -> dict[int, Prompt]:
        """By a sample's place; one without tokens has nothing to score."""
        return {
            place: Prompt(
                place,
                NOTHING,
                [*one.prompt_ids.tolist(), *one.response_ids.tolist()],
                len(one.response_ids),
                one.kept,
            )
            for place, one in enumerate(samples)
            if len(one.response_ids)
        }

    def rows(self, samples: Sequence[Sample], responses: Mapping[int, Response]) -> pa.Table:
        """The update's rows of the column; `responses` by place, one for each prompt."""
        none = np.zeros(0, dtype=np.float32)
        return logprob_table([responses[i].logprobs if i in responses else none for i in range(len(samples))])

    def metrics(self, store: StageStore) -> dict[str, float]:
        """The mean of log behaviour - log teacher over the stage's tokens, as far as the behaviour is known."""
        total, tokens = 0.0, 0
        for update in range(store.updates):
            own = np.concatenate([one.behaviour_logprobs for one in store.read_update(update)])
            total += float(np.subtract(own, np.concatenate(self.column.read(update)), dtype=np.float64).sum())
            tokens += len(own)
        mean = total / max(1, tokens)
        return {} if np.isnan(mean) else {"kl_teacher": mean}
