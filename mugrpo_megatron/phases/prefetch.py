"""`schedule.prefetch`: the learner offers the next stage before this one ends, and takes what others generated."""

from __future__ import annotations

import time

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.phases.evaluate import evaluate_meanwhile
from mugrpo_megatron.phases.generate import check_shared
from mugrpo_megatron.phases.hf import write_hf
from mugrpo_megatron.phases.saves import save_and_stop, save_now
from mugrpo_megatron.run.batch import standing
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.prefetch import read_mark, stage_origin
from mugrpo_megatron.run.run import Engines, Run
from mugrpo_megatron.run.sealing import close_stage
from mugrpo_megatron.stages.store import StageStore

GROUPS_LOOK_S = 1.0
"""How often a waiting learner looks for new groups: it reads small files."""


def offer_next_stage(run: Run, stage: StageStore, cursor: Cursor, resumed: bool) -> None:
    """`schedule.prefetch` updates before the stage's end: write `hf/` with the mark that it samples the next stage.

    Collective. Does nothing at other cursors, and where the next stage is offered or sealed already, as in a run that
    repeats updates: the weights that have begun a stage finish it. A run that has `resumed` after that place, and finds
    no offer, makes it now.
    """
    schedule = run.recipe.schedule
    following = cursor.offers(schedule, stage.updates)
    if following is None or not (resumed or cursor.begins_offer(schedule, stage.updates)):
        return
    if run.world.broadcast(run.is_main and not _offered(run, following)):
        with run.log.phase("save", cursor.stage):
            write_hf(run, cursor, following)


def take_offered_stage(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """Wait until other processes have generated the stage, and seal it, if it was offered to them. Collective.

    Raises UserError, with the learner saved, when no group arrives for `schedule.prefetch_patience_s`, or the stage
    cannot be sealed; Stopped, with the learner saved, when the run is asked to stop.
    """
    if not run.recipe.schedule.prefetch:
        return
    run.saver.wait()  # the offer may still be on its way to the disk
    if not run.world.broadcast(run.is_main and _awaited(run, cursor)):
        return
    evaluate_meanwhile(run, learner, engines, cursor)
    with run.phase("generate", cursor):
        problem = _sealed_or_why_not(run, cursor) if run.is_main else ""
        run.world.barrier()
        problem = run.world.broadcast(problem)
    (stopping,) = run.world.any_rank(run.stop.asked)
    if stopping:
        save_and_stop(run, cursor, "the groups of this stage that are on disk stay there; ")
    if problem:
        save_now(run, cursor)
        raise UserError(problem)
    stage = run.stage_store(cursor)
    check_shared(run, stage, stage.wait_for(set(), sealed=True))


def next_is_offered(run: Run, cursor: Cursor) -> bool:
    """Whether `hf/` has to keep weights that sample the stage at which the cursor stands. Collective."""
    if not run.recipe.schedule.prefetch:
        return False
    run.saver.wait()
    return run.world.broadcast(run.is_main and _offered(run, cursor))


def _offered(run: Run, start: Cursor) -> bool:
    """Whether the stage, or a later one, is offered, or the stage is sealed."""
    mark = read_mark(run.directory, run.record)
    offered = mark is not None and mark.samples is not None and mark.samples.stage >= start.stage
    return offered or StageStore(run.directory.stage(start.stage)).sealed


def _awaited(run: Run, cursor: Cursor) -> bool:
    origin = stage_origin(run.directory, run.record, cursor, run.recipe.schedule)
    return origin.updates < cursor.updates - cursor.age and not run.stage_store(cursor).sealed


def _sealed_or_why_not(run: Run, cursor: Cursor) -> str:
    """Wait for every group and seal the stage; what is wrong if that does not happen, "" too when asked to stop."""
    store, schedule = run.stage_store(cursor), run.recipe.schedule
    wanted = set(range(cursor.stage_updates(schedule) * run.recipe.rollout.prompts_per_update))
    missing = len(wanted - store.named())
    heard_at = time.monotonic()
    with run.display.bar(f"{run.title(cursor)}: wait for its groups", missing, "prompts") as bar:
        while missing and not run.stop.heard():
            time.sleep(GROUPS_LOOK_S)
            now = len(wanted - store.named())
            if now < missing:
                bar.advance(missing - now)
                missing, heard_at = now, time.monotonic()
            elif time.monotonic() - heard_at > schedule.prefetch_patience_s:
                return _nobody(run, cursor, len(wanted) - missing, len(wanted))
    try:
        if not run.stop.asked:
            close_stage(run.directory, run.recipe, standing(run.directory, run.recipe))
    except UserError as error:
        return f"{error}; the learner is saved"
    return ""


def _nobody(run: Run, cursor: Cursor, have: int, of: int) -> str:
    stage, hf = run.directory.stage(cursor.stage), run.directory.hf
    return (
        f"{stage} has {have:,} of {of:,} groups, and none has come for "
        f"{run.recipe.schedule.prefetch_patience_s:,.0f} s; the learner is saved: start `mugrpo generate RECIPE "
        f"--engine-only --follow --shard I/N` for every I and run the same command again, or remove {stage} and {hf}, "
        "and it generates the stage itself"
    )
