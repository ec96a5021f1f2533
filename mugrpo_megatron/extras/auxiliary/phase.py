"""The phase `auxiliary`: engines of auxiliary models start while the policy's engines sleep and the learner is
offloaded, score the stage, and stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.placement import slot_of_environment
from mugrpo_megatron.extras.auxiliary.scoring import AuxiliaryModel, Job, auxiliaries_of, run_job
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.environment import device_memory_in_use
from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import InUse, file_lock
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.leader import LedEngine
from mugrpo_megatron.run.opening import offload_learner
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.stages.store import StageStore


def score_stage(run: Run, learner: Learner, store: StageStore, cursor: Cursor) -> None:
    """Have each auxiliary model of the recipe compute the columns that the cursor's sealed stage lacks. Collective.

    If a column is missing, the learner is offloaded and stays so. Each update's part of a column goes to disk when it
    is finished, so a killed or stopped run computes only what is missing. Waits for processes without a learner that
    score the stage (`shard.py`), and takes over their parts. Raises UserError when an auxiliary model's weights are not
    those that computed its earlier columns; EngineFailure and Stopped as `scoring.run_job` does.
    """
    for auxiliary in auxiliaries_of(run.recipe, run.directory, store, cursor.stage):
        jobs = []
        for job in auxiliary.jobs:
            if not run.world.broadcast(job.column.complete):
                jobs.append(job)
            elif run.is_main:
                job.parts.merge()
        if jobs:
            with _stage_lock(run, cursor):
                _run_jobs(run, learner, store, cursor, auxiliary, jobs)


@contextmanager
def _stage_lock(run: Run, cursor: Cursor) -> Iterator[None]:
    """Keep processes without a learner from scoring the stage while the block runs; before, wait until none scores it.

    Raises Stopped, before the block, if the run is asked to stop. Collective.
    """
    with ExitStack() as stack:
        if run.is_main:
            path = run.directory.stage_lock(cursor.stage)
            try:
                stack.enter_context(file_lock(path))
            except InUse:
                lock_once_free(path, f"score stage {cursor.stage}", run.display, run.stop, stack)
        run.world.barrier()
        run.stop_if_asked(cursor)
        yield


def _run_jobs(
    run: Run, learner: Learner, store: StageStore, cursor: Cursor, auxiliary: AuxiliaryModel, jobs: Sequence[Job]
) -> None:
    """Run an auxiliary model's jobs one after another, each with engines of its own; log the phase. Collective."""
    with run.phase("auxiliary", cursor) as facts:
        offload_learner(learner, run.world)
        facts["memory_before"] = _memory(run)
        for job in jobs:
            if run.world.broadcast(job.parts.missing()):
                engine_recipe = job.recipe(run.recipe, auxiliary.name, auxiliary.directory)
                with _engine(run, engine_recipe, auxiliary.directory, auxiliary.name) as (engines, led):
                    title = f"{cursor.title(run.recipe.schedule)}: {job.what} of {auxiliary.name}"
                    run_job(run, led, engines, store, job, job.parts.missing, title, cursor)
                    memory = (device_memory_in_use() or led.engine.memory) if led else 0.0
                    facts["engine_memory"] = max(run.world.gather(memory))
            run.world.barrier()
            if run.is_main:
                job.parts.merge()
            run.world.barrier()
            facts |= job.metrics(store) if run.is_main else {}
        facts["memory_after"] = _memory(run)


def _memory(run: Run) -> float:
    """Bytes in use on the rank that uses most, for the metrics `memory_before` and `memory_after`. Collective."""
    return max(run.world.gather(device_memory_in_use() or float(psutil.Process().memory_info().rss)))


@contextmanager
def _engine(run: Run, recipe: Recipe, directory: Path, name: str) -> Iterator[tuple[int, LedEngine | None]]:
    """Start an engine if this rank leads one, and stop it when the block ends; yields (number of all engines, this
    rank's engine or None)."""
    slot = slot_of_environment(recipe.engine, finds_cuda())
    with ExitStack() as stack:
        led = None
        if slot.leads_engine:
            log = run.directory.logs / f"auxiliary-{name}-{slot.number:04d}.log"
            led = LedEngine(engine=Engine.start(engine_spec(recipe), directory, log, slot, run.stop.poll))
            stack.callback(led.engine.stop)
        yield slot.engines, led


LOOK_S = 1.0
"""Seconds between two attempts to take a lock that another process holds."""


def lock_once_free(path: Path, work: str, display: Display, stop: StopRequest, stack: ExitStack) -> None:
    """Wait until other processes release the lock `path`, then take it; `stack` releases it.

    Returns without the lock if the run is asked to stop. `work` says what the other processes do, such as "score
    stage 3".
    """
    with display.waiting(f"waiting for the processes that {work}"):
        while not stop.poll():
            try:
                stack.enter_context(file_lock(path))
                return
            except InUse:
                time.sleep(LOOK_S)
