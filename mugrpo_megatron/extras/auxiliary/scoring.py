"""Jobs of auxiliary models on a stage, and the rounds in which engines do a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.auxiliary.auxiliary_columns import ColumnParts, auxiliary_columns
from mugrpo_megatron.extras.auxiliary.jobs import Job, Judge, Teacher
from mugrpo_megatron.extras.auxiliary.models import directory_of
from mugrpo_megatron.files.hf_config import check_weights
from mugrpo_megatron.phases.rounds import Round, check_shared, open_round, report
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import RolloutSection
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.leader import LedEngine
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Prompt, Response, Sample
from mugrpo_megatron.stages.columns import ScoreColumn, TableColumn
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint


@dataclass(frozen=True, slots=True)
class UpdateAnswers:
    """An update's samples, and the engine's responses by the index of the sample in the update.

    The update is complete once there are as many responses as `questions`.
    """

    update: int
    samples: list[Sample]
    questions: int
    responses: dict[int, Response]


@dataclass(frozen=True, slots=True)
class AuxiliaryModel:
    """An auxiliary model of the recipe, and all of its jobs on one stage."""

    name: str
    directory: Path
    jobs: list[Job]


def auxiliaries_of(recipe: Recipe, directory: RunDirectory, store: StageStore, stage: int) -> Iterator[AuxiliaryModel]:
    """The recipe's auxiliary models with their jobs on sealed stage `stage`.

    Raises UserError when a model's weights differ from those that computed the column of this stage or of the stage
    before it.
    """
    columns = list(auxiliary_columns(recipe, directory, store, stage))
    for name in recipe.auxiliary.by_name:
        checkpoint = directory_of(recipe.auxiliary, name)
        check_weights(checkpoint, f"auxiliary.{name}.model")
        weights = fingerprint(checkpoint)
        jobs: list[Job] = []
        for auxiliary, function, column in columns:
            if auxiliary == name:
                _check_weights(column, name, weights, stage)
                parts = ColumnParts(column, weights, store.updates)
                if isinstance(column, ScoreColumn):
                    jobs.append(Judge(recipe, function, checkpoint, column, parts))
                else:
                    jobs.append(Teacher(column, parts))
        yield AuxiliaryModel(name, checkpoint, jobs)


def _check_weights(column: TableColumn, name: str, weights: str, stage: int) -> None:
    """Raise UserError when this stage's column, or that of the stage before it, was computed with other weights."""
    if column.complete:
        column.body()  # raises if the column belongs to another stage
    earlier = column.path.name.replace(f"stage{stage:05d}", f"stage{stage - 1:05d}", 1)
    for known in (column, replace(column, path=column.path.with_name(earlier))):
        if known.weights not in (None, weights):
            raise UserError(
                f"the weights in auxiliary.{name}.model have changed since {known.path} was computed with them; put "
                "the earlier weights back, or begin another run with the new ones"
            )


def samples_per_update(rollout: RolloutSection) -> int:
    return rollout.prompts_per_update * rollout.responses_per_prompt


def run_job(
    run: Run,
    led: LedEngine | None,
    engines: int,
    store: StageStore,
    job: Job,
    missing: Callable[[], Sequence[int]],
    title: str,
    cursor: Cursor,
) -> None:
    """Have the engines do a job in rounds, until `missing()` of rank 0 returns no update any more. Collective.

    `led` is this rank's engine of the auxiliary model, if it leads one of the `engines`. Raises EngineFailure after
    MOST_FAILURES failures of an engine in a row without a finished part between them, and Stopped, with the finished
    parts on disk, when the run was asked to stop.
    """
    width = samples_per_update(run.recipe.rollout)
    while updates := run.world.broadcast(missing()):
        with run.display.bar(title, len(updates), "updates") as bar:
            round = open_round(run, led, updates, bar, engines)
            outcome = round.end(_write_parts(round, led, store, job, width) if led else set())
        of_all = set().union(*outcome.results)
        check_shared(run.world, store, not run.is_main or job.parts.wait_for(of_all))
        if outcome.stopping:
            rest = len(run.world.broadcast(job.parts.missing()))
            run.save_and_stop(cursor, f"{job.what}: {store.updates - rest} of {store.updates} updates are on disk")
        report(run, outcome.failures, "The auxiliary model's engine")
        if led:
            led.restart_if_failed()


def _write_parts(round: Round, led: LedEngine, store: StageStore, job: Job, width: int) -> set[int]:
    """Have the engine answer for those updates of the stage that it takes from the round, `width` samples each.

    Writes an update's part of the column once all its answers are there; returns the numbers of these updates.
    """
    written: set[int] = set()
    with job.workers():
        for answers in _completed_updates(round, store, job, width):
            job.parts.write(answers.update, job.rows(answers.samples, answers.responses))
            written.add(answers.update)
            led.progressed()
            round.finished(sum(len(response.ids) for response in answers.responses.values()))
    return written


def _completed_updates(round: Round, store: StageStore, job: Job, width: int) -> Iterator[UpdateAnswers]:
    in_flight: dict[int, UpdateAnswers] = {}

    def finished() -> Iterator[UpdateAnswers]:
        for answers in [answers for answers in in_flight.values() if len(answers.responses) == answers.questions]:
            yield in_flight.pop(answers.update)

    def take(in_flight_samples: int, slots: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        for update in round.queue.take(-(-in_flight_samples // width), max(1, -(-slots // width))):
            samples = job.read(store, update)
            asked = job.prompts(samples)
            in_flight[update] = UpdateAnswers(update, samples, len(asked), {})
            prompts += [replace(prompt, index=update * STRIDE + index) for index, prompt in asked.items()]
        return prompts

    for prompt, (response,) in round.groups_from(take, 1, job.sampling):
        update, index = divmod(prompt.index, STRIDE)
        in_flight[update].responses[index] = response
        yield from finished()
    yield from finished()  # an update without a prompt, such as one whose questions are all too long, gets no response


STRIDE = 1 << 32
"""The prompt of sample i of update u has the index u * STRIDE + i."""
