"""The learner's passes over a stage without a gradient: log-probabilities and routes that its updates need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import fsync
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import record_routes, token_logprobs
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.samples import behaviour_remedy, formed_update, of_reference
from mugrpo_megatron.phases.saves import save_and_stop
from mugrpo_megatron.run.checkpoints import complete
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.stages.logprobs import has_logprobs, sums, write_logprobs
from mugrpo_megatron.stages.manifest import of_stage
from mugrpo_megatron.stages.routes import has_routes, index, routes_path, write_routes
from mugrpo_megatron.stages.store import StageStore


class _Asked(Exception):
    """A rank was asked to stop during a pass."""


@contextmanager
def learner_pass(run: Run, cursor: Cursor, what: str, ages: Sequence[int]) -> Iterator[Iterator[int]]:
    """The updates of a pass, one after the other, with a bar that says `what`; every rank has ended it after the block.

    When a rank was asked to stop, the next one raises: files that the block writes are dropped, weights that it has
    exchanged are put back, and Stopped is raised with the learner saved. Collective.
    """
    try:
        with (
            run.log.phase("logprobs", cursor.stage),
            run.display.bar(f"{run.title(cursor)}: {what}", len(ages), "updates") as bar,
        ):
            yield _each(run, ages, bar)
    except _Asked:
        save_and_stop(run, cursor)
    run.world.barrier()


def _each(run: Run, ages: Sequence[int], bar: Bar) -> Iterator[int]:
    for age in ages:
        if any(run.world.any_rank(run.stop.asked)):
            raise _Asked
        yield age
        bar.advance()


def record_behaviour(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Record what the recipe wants of the policy before the stage's first update, in one pass.

    These are the behaviour logprobs with `rollout.behaviour = "learner"`, and the experts that the routers choose with
    `learner.routing_replay = "learner"`; the logprobs are those of a pass that replays them, bit by bit.
    """
    path, routes = run.directory.behaviour(cursor.stage), routes_path(stage.directory, "learner")
    scores = run.recipe.rollout.behaviour == "learner" and not has_logprobs(path)
    records = stage.replay == "learner" and not has_routes(routes)
    if cursor.age > 0:  # the weights that they are of have changed
        for missing in [path, sums(path)] * scores + [routes, index(routes)] * records:
            if not missing.exists():
                raise UserError(f"{missing} is missing; {behaviour_remedy(run, cursor.stage)}")
    if not scores and not records:
        return
    with (
        learner_pass(run, cursor, "learner logprobs", range(stage.updates)) as ages,
        write_logprobs(path, of_stage(stage.content), write=run.is_main and scores) as append,
        write_routes(routes, of_stage(stage.content), write=run.is_main and records) as append_routes,
    ):
        for age in ages:
            samples = stage.read_update(age)
            if records:
                logprobs, layers = record_routes(learner, samples)
                append_routes([sample.tokens - 1 for sample in samples], layers)
            else:
                logprobs = token_logprobs(learner, samples)
            append(logprobs)


def refresh_reference(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Every `objective.reference_every` updates the clip's reference policy becomes the current one.

    That policy is kept as its logprobs of all samples until the next refresh, on disk before the first of these updates
    is taken. They are recomputed when a run resumes at this cursor.
    """
    every = run.recipe.objective.reference_every
    if every == 1 or cursor.age % every:
        return
    path = run.directory.reference(cursor.stage, cursor.age)
    held = range(cursor.stage_length(run.recipe.schedule, stage.updates))[cursor.age : cursor.age + every]
    if run.is_main:
        path.parent.mkdir(exist_ok=True)
        fsync(run.directory.path)
    with (
        learner_pass(run, cursor, "reference logprobs", held) as ages,
        write_logprobs(path, of_reference(run, stage, cursor.age), write=run.is_main) as append,
    ):
        for age in ages:
            append(token_logprobs(learner, formed_update(run, stage, cursor.stage, age)))
    if run.is_main:
        _remove_passed_references(run)


def _remove_passed_references(run: Run) -> None:
    """Remove the reference files that no checkpoint can need: all before the one that the oldest checkpoint needs.

    The run resumes from one of its complete checkpoints, or from a later one that is still being written.
    """
    for checkpoint in complete(run.directory.checkpoints)[:1]:
        begun = [path for path in sorted(run.directory.references.glob("*.parquet")) if path.stem <= checkpoint.name]
        for path in begun[:-1]:
            sums(path).unlink(missing_ok=True)
            path.unlink()
