"""What a guest has to do of a stage, and how one engine does it: update by update, each written once it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError
from mugrpo_megatron.extras.guests.judge import Judge
from mugrpo_megatron.extras.guests.models import directory_of
from mugrpo_megatron.extras.guests.parts import Parts
from mugrpo_megatron.extras.guests.teacher import Teacher
from mugrpo_megatron.phases.batches import score_column, teacher_column
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.samples import Prompt, Response, Sample
from mugrpo_megatron.stages.columns import TableColumn
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint


class Job(Protocol):
    """What one guest computes of one stage."""

    what: str
    """As the bar says it."""

    parts: Parts
    sampling: Sampling

    @property
    def column(self) -> TableColumn:
        """Where its results go."""
        ...

    def recipe(self, recipe: Recipe, name: str, directory: Path) -> Recipe:
        """The recipe that the guest's engine is started with."""
        ...

    def read(self, store: StageStore, update: int) -> list[Sample]:
        """An update's samples, with what the job needs of them."""
        ...

    def prompts(self, samples: Sequence[Sample]) -> dict[int, Prompt]:
        """What the engine is asked, by the place of the sample that it is asked for; `index` is that place."""
        ...

    def rows(self, samples: Sequence[Sample], responses: Mapping[int, Response]) -> pa.Table:
        """The update's rows of the column; `responses` by place, one for each prompt."""
        ...

    def metrics(self, store: StageStore) -> dict[str, float]:
        """What the log says of the whole column."""
        ...


@dataclass(frozen=True, slots=True)
class Answered:
    """An update with the engine's responses, by the place of the sample that each is for."""

    update: int
    samples: list[Sample]
    responses: dict[int, Response]


@dataclass(frozen=True, slots=True)
class Guest:
    """A guest of the recipe, and its jobs of one stage, done or not."""

    name: str
    directory: Path
    jobs: list[Job]


def guests_of(recipe: Recipe, directory: RunDirectory, store: StageStore, stage: int) -> Iterator[Guest]:
    """The recipe's guests with their jobs of sealed stage `stage`.

    Raises UserError when the weights of one are not those of the stage's column, or of the stage's before.
    """
    for name in recipe.guest.by_name:
        own = directory_of(recipe, name)
        weights = fingerprint(own)
        jobs = list(_jobs(recipe, directory, name, own, weights, store, stage))
        for job in jobs:
            _check_weights(job.column, name, weights, stage)
        yield Guest(name, own, jobs)


def _jobs(
    recipe: Recipe, directory: RunDirectory, name: str, own: Path, weights: str, store: StageStore, stage: int
) -> Iterator[Job]:
    if recipe.objective.teacher == name:
        logprobs = teacher_column(recipe, directory, store, stage)
        assert logprobs
        yield Teacher(logprobs, Parts(logprobs, weights, store.updates))
    for function, judge in recipe.reward.judges.items():
        if judge.model == name:
            scores = score_column(recipe, directory, store, stage, function)
            yield Judge(recipe, function, own, scores, Parts(scores, weights, store.updates))


def _check_weights(column: TableColumn, name: str, weights: str, stage: int) -> None:
    """UserError when this stage's column, or the one before, was computed with other weights than the guest has now."""
    if column.whole:
        column.body()  # whether it is of this stage
    earlier = column.path.name.replace(f"stage{stage:05d}", f"stage{stage - 1:05d}", 1)
    for one in (column, replace(column, path=column.path.with_name(earlier))):
        if one.weights not in (None, weights):
            raise UserError(
                f"guest.{name}.model holds other weights than when {one.path} was computed with them; put the right "
                "ones back, or choose another run.dir"
            )


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
    open_updates: dict[int, tuple[int, Answered]] = {}
    """Update -> its questions, and what is known of it."""

    def finished() -> Iterator[Answered]:
        for update in [one for one, (count, own) in open_updates.items() if len(own.responses) == count]:
            yield open_updates.pop(update)[1]

    def take(held: int, slots: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        for update in queue.take(-(-held // width), max(1, -(-slots // width))):
            samples = job.read(store, update)
            own = job.prompts(samples)
            open_updates[update] = len(own), Answered(update, samples, {})
            prompts += [replace(prompt, index=update * STRIDE + place) for place, prompt in own.items()]
        return prompts

    for prompt, (response,) in engine.generate_from(take, 1, job.sampling):
        update, place = divmod(prompt.index, STRIDE)
        open_updates[update][1].responses[place] = response
        yield from finished()
    yield from finished()  # where nothing was asked


STRIDE = 1 << 32
"""Between the prompt indices of two updates."""
