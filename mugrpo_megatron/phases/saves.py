"""When a run saves its learner: where the recipe says so, and where someone asks it to stop."""

from __future__ import annotations

from dataclasses import asdict

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.record import MARK, check_hf, mark
from mugrpo_megatron.run.run import Run


def save_if_due(run: Run, cursor: Cursor) -> None:
    """After an update: save the learner's full state where the recipe or a request to stop asks for it.

    The run resumes from `cursor`. Saves at the end of every `checkpoint.every_stages`-th stage and of the last, after
    every `checkpoint.every_updates`-th update of a stage; without engines, in a run that takes one stage's updates,
    always at its end. A save at a stage's end writes `hf/`, too; so do the
    first weights of a stage that may sample the next one (`schedule.max_sample_age`). Raises Stopped, with everything
    saved, when the run was asked to stop.

    The stages since the last save are sealed: a resumed run generates none of them again and repeats their updates.
    """
    section, stage_ends = run.recipe.checkpoint, cursor.age == 0
    last = cursor.finished(run.recipe.schedule) or (stage_ends and not run.world.engines)
    due = last or cursor.stage % section.every_stages == 0 if stage_ends else cursor.due(section.every_updates)
    [stopping] = run.world.any_rank(run.stop.asked)
    saves = stopping or due
    exports = not last and (cursor.samples_next(run.recipe.schedule) or (stage_ends and saves))
    if saves or exports:
        with run.log.phase("save", cursor.stage):
            if saves:
                run.saver.save(cursor)
            if exports:
                write_hf(run, cursor)
    if stopping:
        raise run.stop.all_stopped(cursor)


def write_hf(run: Run, cursor: Cursor) -> None:
    """Write the policy to `hf/`, in place of an earlier one; training continues once it is copied. Collective.

    Engine-only processes sample from it. Raises UserError when something else has come to lie there.
    """
    check_own_hf(run)
    notes = {MARK: mark(run.record, asdict(cursor))}
    run.saver.save_hf(run.recipe.model.directory, run.directory.hf, notes)


def check_own_hf(run: Run) -> None:
    """UserError on every rank unless the run may replace its `hf/`. Collective."""
    refusal = ""
    if run.is_main:
        try:
            check_hf(run.directory.path)
        except UserError as error:
            refusal = f"{error}; the checkpoint is not written, and the same command then writes it"
    if refusal := run.world.broadcast(refusal):
        raise UserError(refusal)
