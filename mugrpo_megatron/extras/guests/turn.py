"""A guest's turn: its engines start while the policy's sleep and the learner is offloaded, do their work, and leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil
import pyarrow as pa

from mugrpo_megatron.engine.client import MOST_FAILURES, Engine
from mugrpo_megatron.engine.placement import EngineSlot, slot_of_environment
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError
from mugrpo_megatron.extras.guests.judge import Judge
from mugrpo_megatron.extras.guests.models import directory_of
from mugrpo_megatron.extras.guests.parts import Parts
from mugrpo_megatron.extras.guests.teacher import Teacher
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.environment import device_memory_in_use, finds_cuda
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.batches import score_column, teacher_column
from mugrpo_megatron.phases.generate import check_shared, shared_queue, show_totals
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.run import Run, give_devices
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


def take_turns(run: Run, learner: Learner, store: StageStore, cursor: Cursor) -> None:
    """Have each guest of the recipe compute the columns that the cursor's sealed stage lacks. Collective.

    Where a column lacks, the learner is offloaded and stays so. Parts of columns are on disk as they are finished: a
    run that is killed or stopped in the turn asks for the others alone. Raises UserError when a guest's weights are not
    those of its earlier columns, EngineFailure after MOST_FAILURES rounds in a row in which an engine fails and
    nothing is done, and Stopped, with the finished parts on disk, when the run was asked to stop.
    """
    for name in run.recipe.guest.by_name:
        directory = directory_of(run.recipe, name)
        weights = fingerprint(directory)
        jobs = []
        for job in _jobs(run, name, directory, weights, store, cursor):
            _check_weights(job.column, name, weights, cursor)
            if not run.world.broadcast(job.column.whole):
                jobs.append(job)
            elif run.is_main:
                job.parts.remove()
        if jobs:
            _take_turn(run, learner, store, cursor, name, directory, jobs)


def _jobs(run: Run, name: str, directory: Path, weights: str, store: StageStore, cursor: Cursor) -> Iterator[Job]:
    if run.recipe.objective.teacher == name:
        logprobs = teacher_column(run.recipe, run.directory, store, cursor.stage)
        assert logprobs
        yield Teacher(logprobs, Parts(logprobs, weights, store.updates))
    for function, judge in run.recipe.reward.judges.items():
        if judge.model == name:
            scores = score_column(run.recipe, run.directory, store, cursor.stage, function)
            yield Judge(run.recipe, function, directory, scores, Parts(scores, weights, store.updates))


def _check_weights(column: TableColumn, name: str, weights: str, cursor: Cursor) -> None:
    """UserError when this stage's column, or the one before, was computed with other weights than the guest has now."""
    if column.whole:
        column.body()  # whether it is of this stage
    earlier = column.path.name.replace(f"stage{cursor.stage:05d}", f"stage{cursor.stage - 1:05d}", 1)
    for one in (column, replace(column, path=column.path.with_name(earlier))):
        if one.weights not in (None, weights):
            raise UserError(
                f"guest.{name}.model holds other weights than when {one.path} was computed with them; put the right "
                "ones back, or choose another run.dir"
            )


def _take_turn(
    run: Run, learner: Learner, store: StageStore, cursor: Cursor, name: str, directory: Path, jobs: Sequence[Job]
) -> None:
    """One guest starts, does its jobs, and leaves; the log says what it took. Collective."""
    with run.phase("guest", cursor) as facts:
        give_devices(learner, run.world)
        facts["memory_before"] = _memory(run)
        for job in jobs:
            own = job.recipe(run.recipe, name, directory)
            with _engine(run, own, directory, name) as (slot, engine):
                _work(run, slot, engine, store, job, f"{run.title(cursor)}: {job.what} of {name}", cursor)
                memory = (device_memory_in_use() or engine.memory) if engine else 0.0
                facts["engine_memory"] = max(run.world.gather(memory))
            run.world.barrier()
            if run.is_main:
                job.parts.merge()
            run.world.barrier()
            facts |= job.metrics(store) if run.is_main else {}
        facts["memory_after"] = _memory(run)


def _memory(run: Run) -> float:
    """Bytes of the rank that uses most, as the metric `memory_before` counts them. Collective."""
    return max(run.world.gather(device_memory_in_use() or float(psutil.Process().memory_info().rss)))


@contextmanager
def _engine(run: Run, own: Recipe, directory: Path, name: str) -> Iterator[tuple[EngineSlot, Engine | None]]:
    """This rank's place among the guest's engines, and the one that it leads; that has left when the block ends."""
    slot = slot_of_environment(own.engine, finds_cuda())
    with ExitStack() as stack:
        engine = None
        if slot.leads_engine:
            log = run.directory.logs / f"guest-{name}-{slot.number:04d}.log"
            engine = Engine.start(own, directory, log, slot, run.stop.heard)
            stack.callback(engine.stop)
        yield slot, engine


def _work(
    run: Run, slot: EngineSlot, engine: Engine | None, store: StageStore, job: Job, title: str, cursor: Cursor
) -> None:
    """Rounds until every update has its part. Collective."""
    failures = 0
    while missing := run.world.broadcast(job.parts.missing()):
        queue = shared_queue(replace(run.world, engines=slot.engines), missing)
        failure, own = _round(run, engine, store, job, queue, title)
        updates = set().union(*run.world.gather(own))
        check_shared(run, store, not run.is_main or job.parts.wait_for(updates))
        if any(run.world.any_rank(run.stop.asked)):
            rest = len(run.world.broadcast(job.parts.missing()))
            raise run.stop.all_stopped(
                cursor, f"{job.what}: {store.updates - rest} of {store.updates} updates are on disk; "
            )
        texts = list(filter(None, run.world.gather(failure)))
        failures = bool(texts) + (0 if updates else failures)
        if failures >= MOST_FAILURES:
            raise EngineFailure(texts[0])
        for text in texts:
            run.log.event("engine_failure", text.splitlines()[0])
            run.display.say(f"{text}\nThe guest's engine is restarted for what is missing.")
        if engine and not engine.running:
            engine.restart()


def _round(
    run: Run, engine: Engine | None, store: StageStore, job: Job, queue: PromptQueue, title: str
) -> tuple[str, set[int]]:
    """All engines take updates from the queue until it is empty. Collective.

    Returns why this rank's engine has failed, and the updates of which it has written the parts.
    """
    updates: set[int] = set()
    with run.display.bar(title, queue.total, "updates") as bar:
        failure = _write(run, engine, store, job, queue, bar, updates) if engine else ""
        run.world.barrier(lambda: show_totals(bar, queue, run.is_main))
        show_totals(bar, queue, run.is_main)
    return failure, updates


def _write(
    run: Run, engine: Engine, store: StageStore, job: Job, queue: PromptQueue, bar: Bar, updates: set[int]
) -> str:
    """Write parts of updates from the queue, and add these to `updates`; says why the engine failed."""
    rollout = run.recipe.rollout
    width = rollout.prompts_per_update * rollout.responses_per_prompt
    try:
        for one in _answered(engine, store, job, queue, width):
            job.parts.write(one.update, job.rows(one.samples, one.responses))
            updates.add(one.update)
            queue.finished(sum(len(response.ids) for response in one.responses.values()))
            show_totals(bar, queue, run.is_main)
            if run.stop.heard():
                break
    except EngineStopped:
        pass
    except EngineFailure as failure:
        queue.leave()
        return str(failure)
    if run.stop.asked:
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
