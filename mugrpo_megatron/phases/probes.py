"""The probe: how the ratios of a few of a stage's responses move while it is optimized. Only the report reads it.

A probe is a forward pass of the learner. It draws no random number and changes no state, so training goes on bit by bit
as without it. It is taken before the checkpoint of the same update, so a run that resumes has every earlier age.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import token_logprobs
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.probe import Probed, probe_ages, write_age, write_responses
from mugrpo_megatron.stages.store import StageStore

PLACES = 4
"""Updates of the stage, evenly spaced, from which the responses are taken."""
NEGATIVE = 0.75
"""Share of the responses with negative advantage: only those can be vetoed."""

Chosen = list[tuple[int, Sample, float]]
"""Responses with their update and their advantage."""


def probe(run: Run, learner: Learner, stage: StageStore, cursor: Cursor, age: int) -> None:
    """Score the probed responses of the stage after `age` of its updates, if the recipe asks. Collective."""
    schedule = run.recipe.schedule
    length = cursor.stage_length(schedule, cursor.stage_updates(schedule))
    if not run.recipe.report.probe_responses or age not in probe_ages(length):
        return
    directory = run.directory.probe(cursor.stage)
    with run.log.phase("probe", cursor.stage):
        chosen = probed(stage, run.recipe)
        logprobs = token_logprobs(learner, [sample for _, sample, _ in chosen])
        if run.is_main and age == 0:
            write_responses(directory, _described(chosen, run.recipe))
        if run.is_main:
            write_age(directory, age, logprobs)


def probed(stage: StageStore, recipe: Recipe) -> Chosen:
    """At most `report.probe_responses` responses, from PLACES updates, evenly spaced in each; always the same ones."""
    updates = sorted({part * stage.updates // PLACES for part in range(PLACES)})
    each, more = divmod(recipe.report.probe_responses, len(updates))
    chosen: Chosen = []
    for place, update in enumerate(updates):
        samples = stage.read_update(update)
        rewards, groups = np.array([s.reward for s in samples]), np.array([s.group for s in samples])
        advantages = group_advantages(rewards, groups, recipe.objective)
        for index in _choice(advantages, each + (place < more)):
            chosen.append((update, samples[index], float(advantages[index])))
    return chosen


def _choice(advantages: np.ndarray, count: int) -> list[int]:
    """At most `count` indices: NEGATIVE of them with negative advantage, where there are so many."""
    negative, others = np.flatnonzero(advantages < 0), np.flatnonzero(advantages >= 0)
    few = min(len(negative), max(round(NEGATIVE * count), count - len(others)))
    return sorted([*_spaced(negative, few), *_spaced(others, min(len(others), count - few))])


def _spaced(indices: np.ndarray, count: int) -> list[int]:
    return [int(indices[place * len(indices) // count]) for place in range(count)]


def _described(chosen: Chosen, recipe: Recipe) -> Sequence[Probed]:
    """The responses as the report shows them, with each token as text."""
    tokenizer = load_tokenizer(recipe.model.directory)
    known = sorted({int(token) for _, sample, _ in chosen for token in sample.response_ids})
    text = dict(zip(known, tokenizer.batch_decode([[token] for token in known]), strict=True))
    return [
        Probed(
            update=update,
            group=sample.group,
            problem=sample.problem,
            reward=sample.reward,
            advantage=advantage,
            tokens=[text[int(token)] for token in sample.response_ids],
            behaviour_logprobs=sample.behaviour_logprobs,
        )
        for update, sample, advantage in chosen
    ]
