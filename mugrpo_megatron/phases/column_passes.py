"""Forward passes of the learner over a stage: they compute its columns, and the probe for the report's heat map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.learner import Learner, swapped_weights
from mugrpo_megatron.learner.update import record_routes, token_logprobs
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.batches import StageBatches
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.policy import ModelSection
from mugrpo_megatron.run.checkpoints import complete_checkpoints
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.initial_model import check_initial_weights
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stage_groups import displayed_advantages
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.columns import Column, LogprobColumn
from mugrpo_megatron.stages.probe import ProbeRow, probe_ages, write_age, write_responses
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint


class _StopAsked(Exception):
    """Raised inside a pass when a rank was asked to stop."""


@contextmanager
def learner_pass(run: Run, cursor: Cursor, what: str, ages: Sequence[int]) -> Iterator[Iterator[int]]:
    """A block for a pass over the stage. It yields an iterator over `ages`, and shows a bar titled `what`.

    Collective: after the block every rank has finished. If a rank was asked to stop, taking the next age raises an
    exception inside the block, so that context managers there discard the files that they write and restore the weights
    that they swapped. `Run.save_and_stop` then ends the run.
    """

    def each(bar: Bar) -> Iterator[int]:
        for age in ages:
            if run.world.any_rank(run.stop.requested):
                raise _StopAsked
            yield age
            bar.advance()

    try:
        with (
            run.phase("logprobs", cursor),
            run.display.bar(f"{cursor.title(run.recipe.schedule)}: {what}", len(ages), "updates") as bar,
        ):
            yield each(bar)
    except _StopAsked:
        run.save_and_stop(cursor)
    run.world.barrier()


def must_compute(column: Column | None, can_compute: bool) -> bool:
    """Whether a column has to be computed: it is needed (not None) and its files are missing.

    Raises UserError if it has to be computed and `can_compute` is false.
    """
    if column is None or column.complete:
        return False
    if not can_compute:
        check_present(column)
    return True


def check_present(column: Column) -> None:
    """Raise UserError if the column, which cannot be computed any more, is missing."""
    if not column.complete:
        path = column.index if column.path.exists() else column.path
        raise UserError(f"{path} is missing, and the weights that it was computed with have changed; {column.remedy}")


def compute_behaviour(run: Run, learner: Learner, stage: StageBatches, cursor: Cursor) -> None:
    """Compute the behaviour logprobs and the routes of the policy before the stage's first update, in one pass.

    Behaviour log-probabilities are needed with `rollout.behaviour = "learner"`, and routes (the experts of each token)
    with `learner.routing_replay = "learner"`. The log-probabilities are bitwise those of a pass that replays the
    routes.
    """
    behaviour, routes = stage.columns.behaviour, stage.columns.routes
    # must_compute is called for both columns before one is computed: in the middle of a stage it raises for a missing
    # column, which must happen even if the other column is there.
    behaviour = behaviour if must_compute(behaviour, cursor.age == 0) else None
    routes = routes if must_compute(routes, cursor.age == 0) else None
    if not behaviour and not routes:
        return
    store = stage.store
    with (
        learner_pass(run, cursor, "learner logprobs", range(store.updates)) as ages,
        behaviour.write(run.is_main) if behaviour else nullcontext() as append_logprobs,
        routes.write(run.is_main) if routes else nullcontext() as append_routes,
    ):
        for age in ages:
            samples = store.read_update(age)
            if append_routes:
                logprobs, layers = record_routes(learner, samples)
                append_routes([sample.tokens - 1 for sample in samples], layers)
            else:
                logprobs = token_logprobs(learner, samples)
            if append_logprobs:
                append_logprobs(logprobs)


def compute_ref(run: Run, learner: Learner, stage: StageBatches, cursor: Cursor) -> None:
    """With `objective.kl_ref`, compute the reference policy's log-probabilities of the stage's responses.

    Does nothing if the reference policy is the behaviour policy, whose log-probabilities are computed or stored anyway.
    Otherwise this takes one forward pass over the stage before the first update. The reference policy's weights are in
    the learner only during that pass, so no second model is kept. A run that resumes reads the column's file. Raises
    UserError when the file belongs to another stage or to other weights than the reference policy's directory has now,
    and when it is missing and cannot be computed again.
    """
    column, weights = stage.columns.ref, stage.columns.ref_weights
    if column is None:
        return
    mark = fingerprint(weights) if weights else ""
    if not must_compute(column, cursor.age == 0 or weights is not None):
        if column.body()["weights"] != mark:
            raise UserError(
                f"the weights in {weights} have changed since {column.path} was computed with them; put the earlier "
                "weights back, or begin another run with the new ones"
            )
        return
    if weights:
        _check_ref(run, cursor.stage, weights, mark)
    with (
        learner_pass(run, cursor, "ref logprobs", range(stage.store.updates)) as ages,
        column.write(run.is_main, weights=mark) as append,
        swapped_weights(learner, weights) if weights else nullcontext(),
    ):
        for age in ages:
            append(token_logprobs(learner, stage.store.read_update(age)))


def _check_ref(run: Run, stage: int, weights: Path, mark: str) -> None:
    """Raise UserError when the weights of the reference policy have changed since the stage before `stage` used them.

    With `objective.kl_ref = "start"` they must also be the weights that the run began with. `mark` is the fingerprint
    of the weights in the directory `weights` now.
    """
    if run.recipe.objective.kl_ref == "start":
        check_initial_weights(run.record, run.recipe.model, f"the reference policy of {run.directory.path}")
    before = LogprobColumn(run.directory.ref(stage - 1), {}) if stage > 0 else None
    if before and before.weights not in (None, mark):
        raise UserError(
            f"the weights in {weights} have changed since {before.path} was computed with them; put the earlier "
            "weights back, or begin another run with the new ones"
        )


def refresh_proximal(run: Run, learner: Learner, stage: StageBatches, cursor: Cursor) -> None:
    """Make the current policy the proximal one, the centre of the clip, every `objective.proximal_every` updates.

    Does nothing with `proximal_every = 1`, where the proximal policy is always the current one. A refresh computes and
    writes the policy's log-probabilities of all samples that are trained on until the next refresh. A run that resumes
    at a refresh repeats it. At a cursor between two refreshes it only checks that these log-probabilities are there.
    """
    every = run.recipe.objective.proximal_every
    if stage.columns.proximal is None:
        return
    column = stage.columns.proximal(cursor.age - cursor.age % every)
    if cursor.age % every:
        check_present(column)
        return
    ages = range(cursor.updates_taken(run.recipe.schedule, stage.store.updates))[cursor.age : cursor.age + every]
    with (
        learner_pass(run, cursor, "proximal logprobs", ages) as passed,
        column.write(run.is_main) as append,
    ):
        for age in passed:
            append(token_logprobs(learner, stage.samples(age)))
    if run.is_main:
        _remove_old_proximal_files(run)


def _remove_old_proximal_files(run: Run) -> None:
    """Remove the proximal policy's columns that no resumed run reads: those older than the one that the oldest
    checkpoint needs."""
    for checkpoint in complete_checkpoints(run.directory.checkpoints)[:1]:
        paths = [
            path for path in sorted(run.directory.proximal_files.glob("*.parquet")) if path.stem <= checkpoint.name
        ]
        for path in paths[:-1]:
            LogprobColumn(path, {}).remove()


PROBED = 32
"""The largest number of a stage's responses in its probe: the rows of a heat map. They take at most nine forward passes
a stage (`probe_ages`)."""
PROBED_UPDATES = 4
"""The largest number of updates, evenly spaced over the stage, whose responses are probed."""
NEGATIVE = 0.75
"""The share of responses with negative advantage in a probe, high because only these can be vetoed."""


class ProbedSample(NamedTuple):
    update: int
    """The stage's update that trains on this response, counted from 0."""
    sample: Sample
    advantage: float


def probe(run: Run, learner: Learner, store: StageStore, cursor: Cursor, age: int) -> None:
    """Compute the log-probabilities of the probed responses after `age` updates, if `probe_ages` has this age.
    Collective.

    The forward pass draws no random number and changes no state, so training continues bitwise as without it. It runs
    before the checkpoint of the same update, so a resumed run has the probes of every earlier age.
    """
    length = cursor.updates_taken(run.recipe.schedule, store.updates)
    if age not in probe_ages(length):
        return
    directory = run.directory.probe(cursor.stage)
    with run.phase("probe", cursor):
        probed = choose_responses(store, run.recipe.objective)
        logprobs = token_logprobs(learner, [response.sample for response in probed])
        if run.is_main and age == 0:
            write_responses(directory, _described(probed, run.recipe.model))
        if run.is_main:
            write_age(directory, age, logprobs)


def choose_responses(store: StageStore, objective: ObjectiveSection) -> list[ProbedSample]:
    """Choose at most PROBED responses from at most PROBED_UPDATES updates of a stage, always the same ones."""
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
    """Returns the indices of at most `count` responses, a share of NEGATIVE with negative advantage. If there are too
    few responses of one kind, more of the other are chosen."""
    negative, others = np.flatnonzero(advantages < 0), np.flatnonzero(advantages >= 0)
    wanted = min(len(negative), max(round(NEGATIVE * count), count - len(others)))
    return sorted([*_spaced(negative, wanted), *_spaced(others, min(len(others), count - wanted))])


def _spaced(indices: np.ndarray, count: int) -> list[int]:
    return [int(indices[step * len(indices) // count]) for step in range(count)]


def _described(probed: Sequence[ProbedSample], model: ModelSection) -> list[ProbeRow]:
    """The probed responses as rows for the report, with each token as text."""
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
