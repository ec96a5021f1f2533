"""What a guest has to do of a stage, and how one engine does it: update by update, each written once it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError
from mugrpo_megatron.extras.guests.judge import Judge
from mugrpo_megatron.extras.guests.models import directory_of
from mugrpo_megatron.extras.guests.parts import Parts
from mugrpo_megatron.extras.guests.taking import guest_columns
from mugrpo_megatron.extras.guests.teacher import Teacher
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.samples import Prompt, Response, Sample
from mugrpo_megatron.stages.columns import ScoreColumn, TableColumn
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import fingerprint

Job = Teacher | Judge
"""What one guest computes of one stage; prompts and responses are by the place of their sample in the update."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An update with the engine's responses, by the place of the sample that each is for."""

    update: int
    samples: list[Sample]
    questions: int
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
    columns = list(guest_columns(recipe, directory, store, stage))
    for name in recipe.guest.by_name:
        own = directory_of(recipe, name)
        weights = fingerprint(own)
        jobs: list[Job] = []
        for guest, function, column in columns:
            if guest == name:
                _check_weights(column, name, weights, stage)
                parts = Parts(column, weights, store.updates)
                if isinstance(column, ScoreColumn):
                    jobs.append(Judge(recipe, function, own, column, parts))
                else:
                    jobs.append(Teacher(column, parts))
        yield Guest(name, own, jobs)


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
