"""The samples of an update: formed as the recipe asks, with the log-probabilities that the passes have left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mugrpo_megatron.algorithm.advantages import informative, informative_updates
from mugrpo_megatron.data.prepare import update_at
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.run.anchor import with_anchor
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.logprobs import has_logprobs, read_logprobs
from mugrpo_megatron.stages.manifest import of_stage
from mugrpo_megatron.stages.store import StageStore


def read_update(run: Run, stage: StageStore, cursor: Cursor) -> list[Sample]:
    """The samples of one update, with the behaviour and reference logprobs that the recipe asks for.

    Passes over the stage after the first take its updates in an order that the run's seed shuffles. With
    `objective.zero_variance = "leave_out"` updates consist of informative groups only. Raises UserError when the
    reference of a resumed run's update is missing.
    """
    samples = formed_update(run, stage, cursor.stage, cursor.age)
    every = run.recipe.objective.reference_every
    if every == 1:
        return samples
    place = cursor.age % every
    begun = Cursor(cursor.stage, cursor.age - place)
    path = run.directory.reference(begun.stage, begun.age)
    remedy = (
        f"update {cursor.age} of stage {cursor.stage} (both from 0) clips around what it held; restore it from a copy, "
        f"or remove the checkpoints after {checkpoint_name(begun)} from {run.directory.checkpoints}, so that the run "
        "resumes from an earlier one"
    )
    if not has_logprobs(path):
        raise UserError(f"{path} is gone, and {remedy}")
    reference = read_logprobs(path, of_reference(run, stage, begun.age), place, remedy)
    return [replace(sample, reference_logprobs=logprobs) for sample, logprobs in zip(samples, reference, strict=True)]


def of_reference(run: Run, stage: StageStore, age: int) -> dict[str, Any]:
    """What reference logprobs belong to: the stage, and the run's weights before the update `age`."""
    return {"stage": stage.content, "run": run.record.id, "age": age}


def behaviour_remedy(run: Run, stage: int) -> str:
    return (
        f"restore both from a copy, or remove them and the checkpoints after {checkpoint_name(Cursor(stage))} from "
        f"{run.directory.checkpoints}: the run then resumes at the stage's start and computes them again"
    )


def formed_update(run: Run, stage: StageStore, number: int, age: int) -> list[Sample]:
    """The samples of the update taken at `age` of stage `number`; informative groups only where the recipe asks."""
    taken = update_at(run.recipe.run.seed, number, stage.updates, age)
    if run.recipe.objective.zero_variance != "leave_out":
        return _stored_update(run, stage, number, taken)
    per_update = run.recipe.rollout.prompts_per_update
    rewards, groups = stage.rewards()
    differs = np.zeros(groups.max() + 1, dtype=bool)
    differs[groups] = informative(rewards, groups)
    chosen = informative_updates(differs, per_update)[taken]
    stored = {place: _stored_update(run, stage, number, place) for place in sorted({*(chosen // per_update).tolist()})}
    return [
        replace(sample, group=place)  # a group that occurs twice in one update counts as two groups
        for place, group in enumerate(chosen.tolist())
        for sample in stored[group // per_update]
        if sample.group == group
    ]


def _stored_update(run: Run, stage: StageStore, number: int, update: int) -> list[Sample]:
    """The samples of an update as the stage holds it, with the behaviour logprobs that the recipe asks for."""
    samples = stage.read_update(update)
    if run.recipe.rollout.behaviour == "engine":
        return with_anchor(run, stage, number, update, samples)
    path = run.directory.behaviour(number)
    behaviour = read_logprobs(path, of_stage(stage.content), update, behaviour_remedy(run, number))
    samples = [
        replace(sample, behaviour_logprobs=own, engine_logprobs=sample.behaviour_logprobs)
        for sample, own in zip(samples, behaviour, strict=True)
    ]
    return with_anchor(run, stage, number, update, samples)
