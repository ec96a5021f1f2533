"""The probe: forward passes over a few responses of a stage at several ages, for the report's heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import token_logprobs
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.policy import ModelSection
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stage_groups import displayed_advantages
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.probe import ProbeRow, probe_ages, write_age, write_responses
from mugrpo_megatron.stages.store import StageStore

PROBED = 32
"""Responses of a stage in its probe, the rows of a heat map: nine forward passes over them a stage."""
PROBED_UPDATES = 4
"""Updates of the stage, evenly spaced, from which the responses are taken."""
NEGATIVE = 0.75
"""Share of the responses with negative advantage: only those can be vetoed."""


class ProbedSample(NamedTuple):
    """A response in the probe."""

    update: int
    """The stage's update that trains on it, from 0."""
    sample: Sample
    advantage: float


def probe(run: Run, learner: Learner, store: StageStore, cursor: Cursor, age: int) -> None:
    """Compute the logprobs of the probed responses after `age` updates of the stage, where a probe is due. Collective.

    The forward pass draws no random number and changes no state, so training continues bitwise as without it. It runs
    before the checkpoint of the same update, so a resumed run has the probes of every earlier age.
    """
    length = cursor.stage_length(run.recipe.schedule, store.updates)
    if age not in probe_ages(length):
        return
    directory = run.directory.probe(cursor.stage)
    with run.log.phase("probe", cursor.stage):
        probed = choose_responses(store, run.recipe.objective)
        logprobs = token_logprobs(learner, [response.sample for response in probed])
        if run.is_main and age == 0:
            write_responses(directory, _described(probed, run.recipe.model))
        if run.is_main:
            write_age(directory, age, logprobs)


def choose_responses(store: StageStore, objective: ObjectiveSection) -> list[ProbedSample]:
    """Returns at most PROBED responses from PROBED_UPDATES updates, always the same ones."""
    updates = sorted({number * store.updates // PROBED_UPDATES for number in range(PROBED_UPDATES)})
    count, remainder = divmod(PROBED, len(updates))
    probed = []
    for number, update in enumerate(updates):
        samples = store.read_update(update, with_text=objective.has_user_advantage)
        advantages = displayed_advantages(samples, objective)
        for index in _choice(advantages, count + (number < remainder)):
            probed.append(ProbedSample(update, samples[index], float(advantages[index])))
    return probed


def _choice(advantages: np.ndarray, count: int) -> list[int]:
    """Returns at most `count` indices; a share of NEGATIVE has negative advantage if there are that many."""
    negative, others = np.flatnonzero(advantages < 0), np.flatnonzero(advantages >= 0)
    wanted = min(len(negative), max(round(NEGATIVE * count), count - len(others)))
    return sorted([*_spaced(negative, wanted), *_spaced(others, min(len(others), count - wanted))])


def _spaced(indices: np.ndarray, count: int) -> list[int]:
    return [int(indices[step * len(indices) // count]) for step in range(count)]


def _described(probed: Sequence[ProbedSample], model: ModelSection) -> list[ProbeRow]:
    """Returns the responses as the report shows them, each token as text."""
    tokenizer = load_tokenizer(model.directory)
    vocabulary = sorted({int(token) for response in probed for token in response.sample.response_ids})
    text = dict(zip(vocabulary, tokenizer.batch_decode([[token] for token in vocabulary]), strict=True))
    return [
        ProbeRow(
            update=update,
            group=sample.group,
            problem=sample.problem,
            reward=sample.reward,
            advantage=advantage,
            tokens=[text[int(token)] for token in sample.response_ids],
            engine_logprobs=sample.engine_logprobs,
            mask=None if sample.loss_mask is None else sample.loss_mask.tolist(),
        )
        for update, sample, advantage in probed
    ]
