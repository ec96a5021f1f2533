"""Generation without a learner: one engine, started from weights on disk, samples one share of a stage.

No process group, no Megatron: any number of such processes may run at once, on machines that share the run directory,
and each may be killed and started again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing

from mugrpo_megatron.data.prepare import Problems, prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import MOST_FAILURES, Engine, first_start_problem
from mugrpo_megatron.engine.launch import check_allocator, sampling
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError
from mugrpo_megatron.evaluation.scoring import Group, ScoredGroup, Scorer
from mugrpo_megatron.extras.auxiliary.share import ShareTurn
from mugrpo_megatron.extras.prefetch.shares import Position, Share, begin, mark_share
from mugrpo_megatron.observe.environment import finds_cuda
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.directory import RunDirectory, lock_soon, locked
from mugrpo_megatron.run.record import editable_after_failure
from mugrpo_megatron.run.responses import rows_of, stage_prompt
from mugrpo_megatron.run.stopping import StopRequest, handle_signals
from mugrpo_megatron.stages.manifest import check_stage
from mugrpo_megatron.stages.store import StageStore


def generate_share(recipe: Recipe, share: Share, stage: int | None, problems: Problems) -> str:
    """Sample and score what the stage lacks of the share, or have auxiliary models score the stage once it is sealed.

    Returns what is done, and what comes next. Groups go to disk as they are scored, and so does what auxiliary
    models compute of an update: a process that was killed continues where it was. Raises UserError when `stage` is
    given and is not the
    run's next one, when another process generates the same share, or when the share was begun with other weights;
    EngineFailure after MOST_FAILURES failures in a row without a finished group; Stopped, with every scored
    group on disk, when asked to stop.
    """
    where = begin(recipe, problems)
    directory, cursor = RunDirectory(recipe.run.dir), where.cursor
    if stage not in (None, cursor.stage):
        raise UserError(f"{directory.path} is at stage {cursor.stage}, not at stage {stage}; omit --stage")
    with (
        lock_soon(directory.path / ".lock", shared=True),  # other shares may; learners and `mugrpo seal` may not
        _only_one(directory, share),
        handle_signals(is_main=True) as stop,
        open_display() as display,
    ):
        groups = _generate_missing(recipe, share, where, problems, display, stop)
        lacking = None
        if recipe.auxiliary.by_name and StageStore(where.stage).sealed:
            auxiliaries = _auxiliaries(recipe, share, where, display, stop)
            auxiliaries.take()
            lacking = auxiliaries.gather()
    if lacking is None:
        after = f"once all shares have, `mugrpo seal {directory.path}`"
    elif lacking:
        after = f"of other shares the stage lacks {lacking}; run them again"
    else:
        after = "the stage has all that auxiliary models compute; `mugrpo optimize` takes its updates"
    return f"share {share} has all of its {groups:,} groups; {after}"


def _only_one(directory: RunDirectory, share: Share) -> AbstractContextManager[None]:
    """Keeps a second process from the same share."""
    return locked(directory.logs / f"share-{share.writer:04d}.lock")


def _auxiliaries(recipe: Recipe, share: Share, where: Position, display: Display, stop: StopRequest) -> ShareTurn:
    stage = where.cursor.stage
    store = StageStore(RunDirectory(recipe.run.dir).stage(stage), origin=where.origin)
    return ShareTurn(recipe, store, stage, _slot(share), display, stop)


def _generate_missing(
    recipe: Recipe, share: Share, where: Position, problems: Problems, display: Display, stop: StopRequest
) -> int:
    """Generate what the stage lacks of the share; the number of its groups. Raises Stopped when asked to stop."""
    store = StageStore(where.stage, share.writer, where.origin)
    mine = share.groups(where.cursor.stage_updates(recipe.schedule) * recipe.rollout.prompts_per_update)
    if store.sealed or mine <= store.present():
        return len(mine)
    check_stage(store.directory, where.origin)
    mark_share(share, where, problems)
    _generate(recipe, share, where, store, sorted(mine - store.present()), problems, display, stop)
    if stop.asked:
        raise stop.stopped(f"{len(mine & store.present())} of {len(mine)} groups of share {share} are on disk")
    return len(mine)


def _generate(
    recipe: Recipe,
    share: Share,
    where: Position,
    store: StageStore,
    missing: list[int],
    problems: Problems,
    display: Display,
    stop: StopRequest,
) -> None:
    tokenizer = load_tokenizer(recipe.model.directory)
    prepared = prepare(recipe.data, recipe.reward, tokenizer, problems)
    log = RunDirectory(recipe.run.dir).logs / f"engine-share-{share.writer:04d}.log"
    how, n = sampling(recipe, tokenizer), recipe.rollout.responses_per_prompt
    with ExitStack() as stack:
        stack.enter_context(editable_after_failure(recipe.run.dir))
        if finds_cuda():
            check_allocator()
        engine = Engine.start(recipe, where.weights, log, _slot(share), stop.heard)
        stack.callback(engine.stop)
        verifier = stack.enter_context(Verifier(recipe.reward))
        with display.waiting(f"waiting for the engine, see {log}"):
            if problem := first_start_problem(engine):
                raise UserError(problem)
        failures = 0
        with display.bar(f"stage {where.cursor.stage}, share {share}", len(missing), "prompts") as bar:

            def keep(group: ScoredGroup) -> None:
                store.append(rows_of(group, recipe))
                missing.remove(group.prompt.index)
                bar.advance(tokens=group.tokens)

            while missing and not stop.heard():
                before, failure = len(missing), None
                scorer = Scorer(verifier, tokenizer)
                try:
                    engine.wait_ready()
                    engine.set_version(where.version)
                    prompts = (stage_prompt(recipe, prepared, where.cursor, group) for group in tuple(missing))
                    with closing(engine.generate(prompts, n, how)) as groups:
                        for group in scorer.during(_until(groups, stop)):
                            keep(group)
                except EngineFailure as error:
                    failure = error
                for group in scorer.rest(stop.heard):
                    keep(group)
                store.flush()
                if failure and not isinstance(failure, EngineStopped):
                    failures = failures + 1 if len(missing) == before else 1
                    if failures >= MOST_FAILURES:
                        raise failure
                    display.say(f"{failure}\nThe engine is restarted for what is missing.")
                    engine.restart()


def _until(groups: Iterator[Group], stop: StopRequest) -> Iterator[Group]:
    """The groups until the process is asked to stop."""
    for group in groups:
        yield group
        if stop.heard():
            return


def _slot(share: Share) -> EngineSlot:
    """This machine's first devices, with a random stream of its own among the shares."""
    return EngineSlot(True, number=share.number, engines=share.of, local=0, local_engines=1, gpu=0)
