"""What auxiliary models have to do of a stage, what of it a branch takes from another run, and how one engine does a
job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError
from mugrpo_megatron.extras.auxiliary.jobs import Job, Judge, Teacher
from mugrpo_megatron.extras.auxiliary.models import directory_of
from mugrpo_megatron.extras.auxiliary.parts import Parts
from mugrpo_megatron.phases.batches import score_column, teacher_column
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.branch import link_or_copy
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.samples import Prompt, Response, Sample
from mugrpo_megatron.stages.columns import LogprobColumn, ScoreColumn, TableColumn
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint


@dataclass(frozen=True, slots=True)
class Answered:
    """An update with the engine's responses, by the place of the sample that each is for."""

    update: int
    samples: list[Sample]
    questions: int
    responses: dict[int, Response]


@dataclass(frozen=True, slots=True)
class AuxiliaryModel:
    """An auxiliary model of the recipe, and its jobs of one stage, done or not."""

    name: str
    directory: Path
    jobs: list[Job]


def auxiliaries_of(recipe: Recipe, directory: RunDirectory, store: StageStore, stage: int) -> Iterator[AuxiliaryModel]:
    """The recipe's auxiliary models with their jobs of sealed stage `stage`.

    Raises UserError when the weights of one are not those of the stage's column, or of the stage's before.
    """
    columns = list(auxiliary_columns(recipe, directory, store, stage))
    for name in recipe.auxiliary.by_name:
        own = directory_of(recipe, name)
        weights = fingerprint(own)
        jobs: list[Job] = []
        for auxiliary, function, column in columns:
            if auxiliary == name:
                _check_weights(column, name, weights, stage)
                parts = Parts(column, weights, store.updates)
                if isinstance(column, ScoreColumn):
                    jobs.append(Judge(recipe, function, own, column, parts))
                else:
                    jobs.append(Teacher(column, parts))
        yield AuxiliaryModel(name, own, jobs)


def _check_weights(column: TableColumn, name: str, weights: str, stage: int) -> None:
    """UserError when this stage's column, or the one before, was computed with other weights than the auxiliary
    model has now."""
    if column.whole:
        column.body()  # whether it is of this stage
    earlier = column.path.name.replace(f"stage{stage:05d}", f"stage{stage - 1:05d}", 1)
    for one in (column, replace(column, path=column.path.with_name(earlier))):
        if one.weights not in (None, weights):
            raise UserError(
                f"auxiliary.{name}.model holds other weights than when {one.path} was computed with them; put the "
                "right ones back, or choose another run.dir"
            )


def auxiliary_columns(
    recipe: Recipe, directory: RunDirectory, store: StageStore, stage: int
) -> Iterator[tuple[str, str, LogprobColumn | ScoreColumn]]:
    """The recipe's columns of a sealed stage, with the auxiliary model's name and, of a judge, the reward
    function's."""
    if recipe.objective.teacher and (logprobs := teacher_column(recipe, directory, store, stage)):
        yield recipe.objective.teacher, "", logprobs
    for function, judge in recipe.reward.judges.items():
        assert judge.model
        yield judge.model, function, score_column(recipe, directory, store, stage, function)


def take_columns(recipe: Recipe, source: RunDirectory, target: RunDirectory, stage: int) -> None:
    """Give the branch in `target` the columns of `stage` in `source`: hard links, or copies on another file system.

    One of another auxiliary model, or of other weights, questions or parsers, is left out: the branch computes its own.
    """
    for name, _, column in auxiliary_columns(recipe, target, StageStore(target.stage(stage)), stage):
        theirs = replace(column, path=source.path / column.path.relative_to(target.path))
        if column.whole or not _fits(theirs, fingerprint(directory_of(recipe, name))):
            continue
        column.begin()
        for path, copy in ((theirs.path, column.path), (theirs.index, column.index)):
            copy.unlink(missing_ok=True)  # of a branch that was killed
            link_or_copy(path, copy)


def _fits(column: TableColumn, weights: str) -> bool:
    try:
        return column.whole and bool(column.body()["weights"] == weights)
    except UserError:  # damaged, or of something else than the recipe's
        return False


def samples_per_update(recipe: Recipe) -> int:
    return recipe.rollout.prompts_per_update * recipe.rollout.responses_per_prompt


def write_parts(
    engine: Engine,
    store: StageStore,
    job: Job,
    queue: PromptQueue,
    width: int,
    stop: StopRequest,
    written: Callable[[int], None],
) -> str:
    """Write the parts of updates from the queue, each of `width` samples, and call `written` with every one.

    Ends once the queue is empty or the run is asked to stop. Returns why the engine failed, or nothing.
    """
    try:
        for one in _answered(engine, store, job, queue, width):
            job.parts.write(one.update, job.rows(one.samples, one.responses))
            queue.finished(sum(len(response.ids) for response in one.responses.values()))
            written(one.update)
            if stop.heard():
                break
    except EngineStopped:
        pass
    except EngineFailure as failure:
        queue.leave()
        return str(failure)
    if stop.asked:
        queue.close()
    return ""


def _answered(engine: Engine, store: StageStore, job: Job, queue: PromptQueue, width: int) -> Iterator[Answered]:
    """Updates as they are finished; each has `width` samples."""
    in_flight: dict[int, Answered] = {}

    def finished() -> Iterator[Answered]:
        for one in [one for one in in_flight.values() if len(one.responses) == one.questions]:
            yield in_flight.pop(one.update)

    def take(held: int, slots: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        for update in queue.take(-(-held // width), max(1, -(-slots // width))):
            samples = job.read(store, update)
            own = job.prompts(samples)
            in_flight[update] = Answered(update, samples, len(own), {})
            prompts += [replace(prompt, index=update * STRIDE + place) for place, prompt in own.items()]
        return prompts

    for prompt, (response,) in engine.generate_from(take, 1, job.sampling):
        update, place = divmod(prompt.index, STRIDE)
        in_flight[update].responses[place] = response
        yield from finished()
    yield from finished()  # where nothing was asked


STRIDE = 1 << 32
"""Between the prompt indices of two updates."""
