"""A stage's log-probabilities under the anchor of the KL penalty: where they are, and the samples with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.logprobs import read_logprobs
from mugrpo_megatron.stages.store import StageStore


def anchor_weights(recipe: Recipe) -> Path | None:
    """The checkpoint that `objective.kl_anchor` names; None where the anchor is the learner at the stage's start."""
    name = recipe.objective.kl_anchor
    if name is None or name == "stage":
        return None
    return recipe.model.directory if name == "start" else Path(name)


def anchor_is_behaviour(recipe: Recipe) -> bool:
    """Whether the anchor's logprobs are the behaviour's: both of the learner with the stage's first weights."""
    return recipe.objective.kl_anchor == "stage" and recipe.rollout.behaviour == "learner"


def of_anchor(run: Run, stage: StageStore) -> dict[str, Any]:
    """What anchor log-probabilities belong to: the stage, and the anchor's name."""
    return {"stage": stage.content, "anchor": run.recipe.objective.kl_anchor}


def anchor_remedy(run: Run, stage: int) -> str:
    path = run.directory.anchor(stage)
    return f"remove {path} and {path.with_suffix('.json').name}, and the same command computes them again"


def with_anchor(run: Run, stage: StageStore, number: int, age: int, samples: Sequence[Sample]) -> list[Sample]:
    """The samples of update `age` of stage `number` with their anchor log-probabilities, where the recipe asks for it.

    Raises UserError when these are missing, damaged or of another stage or anchor.
    """
    if run.recipe.objective.kl_anchor is None:
        return list(samples)
    if anchor_is_behaviour(run.recipe):
        return [replace(sample, anchor_logprobs=sample.behaviour_logprobs) for sample in samples]
    found = read_logprobs(run.directory.anchor(number), of_anchor(run, stage), age, anchor_remedy(run, number))
    return [replace(sample, anchor_logprobs=own) for sample, own in zip(samples, found, strict=True)]
