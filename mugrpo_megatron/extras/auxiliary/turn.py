"""An auxiliary model's turn: its engines start while the policy's sleep and the learner is offloaded, do their work,
and leave."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.engine.client import MOST_FAILURES, Engine
from mugrpo_megatron.engine.placement import EngineSlot, slot_of_environment
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.extras.auxiliary.scoring import (
    AuxiliaryModel,
    Job,
    auxiliaries_of,
    samples_per_update,
    write_parts,
)
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.environment import device_memory_in_use
from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.phases.generate import check_shared, shared_queue, show_totals
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import InUse, locked
from mugrpo_megatron.run.run import Run, give_devices
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.stages.store import StageStore


def take_turns(run: Run, learner: Learner, store: StageStore, cursor: Cursor) -> None:
    """Have each auxiliary model of the recipe compute the columns that the cursor's sealed stage lacks. Collective.

    Where a column lacks, the learner is offloaded and stays so. Parts of columns are on disk as they are finished: a
    run that is killed or stopped in the turn asks for the others alone, and so does one whose stage processes without a
    learner have scored (`share.py`); it waits for those that are at work. Raises UserError when an auxiliary model's
    weights are not those of its earlier columns, EngineFailure after MOST_FAILURES rounds in a row in which an
    engine fails
    and nothing is done, and Stopped, with the finished parts on disk, when the run was asked to stop.
    """
    for auxiliary in auxiliaries_of(run.recipe, run.directory, store, cursor.stage):
        jobs = []
        for job in auxiliary.jobs:
            if not run.world.broadcast(job.column.whole):
                jobs.append(job)
            elif run.is_main:
                job.parts.merge()
        if jobs:
            with _alone(run, cursor):
                _take_turn(run, learner, store, cursor, auxiliary, jobs)


@contextmanager
def _alone(run: Run, cursor: Cursor) -> Iterator[None]:
    """No process without a learner scores the stage in the block; waits for those that do. Collective."""
    with ExitStack() as stack:
        if run.is_main:
            path = run.directory.stage_lock(cursor.stage)
            try:
                stack.enter_context(locked(path))
            except InUse:
                lock_once_free(path, f"score stage {cursor.stage}", run.display, run.stop, stack)
        run.world.barrier()
        if any(run.world.any_rank(run.stop.asked)):
            raise run.stop.all_stopped(cursor)
        yield


def _take_turn(
    run: Run, learner: Learner, store: StageStore, cursor: Cursor, auxiliary: AuxiliaryModel, jobs: Sequence[Job]
) -> None:
    """One auxiliary model starts where parts lack, does its jobs, and leaves; the log says what it took. Collective."""
    with run.phase("auxiliary", cursor) as facts:
        give_devices(learner, run.world)
        facts["memory_before"] = _memory(run)
        for job in jobs:
            if run.world.broadcast(job.parts.missing()):
                own = job.recipe(run.recipe, auxiliary.name, auxiliary.directory)
                with _engine(run, own, auxiliary.directory, auxiliary.name) as (slot, engine):
                    title = f"{cursor.title(run.recipe.schedule)}: {job.what} of {auxiliary.name}"
                    _work(run, slot, engine, store, job, title, cursor)
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
    """This rank's place among the auxiliary model's engines, and the one that it leads; that has left when the block
    ends."""
    slot = slot_of_environment(own.engine, finds_cuda())
    with ExitStack() as stack:
        engine = None
        if slot.leads_engine:
            log = run.directory.logs / f"auxiliary model-{name}-{slot.number:04d}.log"
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
        check_shared(run.world, store, not run.is_main or job.parts.wait_for(updates))
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
            run.display.say(f"{text}\nThe auxiliary model's engine is restarted for what is missing.")
        if engine and not engine.running:
            engine.restart()


def _round(
    run: Run, engine: Engine | None, store: StageStore, job: Job, queue: PromptQueue, title: str
) -> tuple[str, set[int]]:
    """All engines take updates from the queue until it is empty. Collective.

    Returns why this rank's engine has failed, and the updates of which it has written the parts.
    """
    updates: set[int] = set()
    failure = ""
    with run.display.bar(title, queue.total, "updates") as bar:

        def written(update: int) -> None:
            updates.add(update)
            show_totals(bar, queue, run.is_main)

        if engine:
            failure = write_parts(engine, store, job, queue, samples_per_update(run.recipe), run.stop, written)
        run.world.barrier(lambda: show_totals(bar, queue, run.is_main))
        show_totals(bar, queue, run.is_main)
    return failure, updates


LOOK_S = 1.0
"""Seconds between two attempts to take a lock that another process holds."""


def lock_once_free(path: Path, work: str, display: Display, stop: StopRequest, stack: ExitStack) -> None:
    """Hold a lock in `stack` once those that `work` have let it go, or not at all when the run is asked to stop."""
    with display.waiting(f"waiting for those that {work}"):
        while not stop.heard():
            try:
                stack.enter_context(locked(path))
                return
            except InUse:
                time.sleep(LOOK_S)
