"""When a run saves its learner: where the recipe says so, and where someone asks it to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch.profiler import ProfilerActivity, profile, supported_activities

from mugrpo_megatron.phases.hf import write_hf
from mugrpo_megatron.run.checkpoints import newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.run import Run


def save_if_due(run: Run, cursor: Cursor) -> None:
    """After an update: save the learner's full state where the recipe or a request to stop asks for it.

    The run resumes from `cursor`. Saves at the end of every `checkpoint.every_stages`-th stage and of the last, after
    every `checkpoint.every_updates`-th update of a stage, and every `checkpoint.every_minutes`; without engines,
    in a run that takes one stage's updates, always at its end. A save at a stage's end writes `hf/`, too. Raises
    Stopped, with everything saved, when the run was asked to stop.

    The stages since the last save are sealed: a resumed run generates none of them again and repeats their updates.
    """
    section, stage_ends = run.recipe.checkpoint, cursor.age == 0
    last = cursor.finished(run.recipe.schedule) or not run.world.engines
    due = last or cursor.stage % section.every_stages == 0 if stage_ends else cursor.due(section.every_updates)
    stopping, overdue = run.world.any_rank(run.stop.asked, run.is_main and run.saver.overdue)
    if stopping or overdue or due:
        with run.log.phase("save", cursor.stage):
            run.saver.save(cursor)
            if stage_ends and not last and section.hf and not run.recipe.schedule.prefetch:
                write_hf(run, cursor)  # with prefetch hf/ holds the weights that sample the next stage
    if stopping:
        save_and_stop(run, cursor)


def save_now(run: Run, cursor: Cursor) -> None:
    """Save the learner, durably, unless it is saved at `cursor`, where the run will resume. Collective."""
    run.saver.wait()
    if not any(run.world.any_rank(run.is_main and newest_cursor(run.directory.checkpoints) == cursor)):
        with run.log.phase("save", cursor.stage):
            run.saver.save(cursor)
        run.saver.wait()


def save_and_stop(run: Run, cursor: Cursor, kept: str = "") -> NoReturn:
    """`save_now`, and raise Stopped. Collective.

    `kept` says what else is kept or dropped.
    """
    save_now(run, cursor)
    raise run.stop.stopped(f"{kept}the learner is saved at update {cursor.updates} of the run")


@contextmanager
def profiled(run: Run, cursor: Cursor) -> Iterator[None]:
    """Record the update inside where the recipe asks for it, on every rank; it takes longer than others.

    The trace is for chrome://tracing or Perfetto.
    """
    if cursor.updates not in run.recipe.track.profile_updates:
        yield
        return
    path = run.directory.trace(cursor.updates, run.world.ranks.rank)
    path.parent.mkdir(exist_ok=True)
    with profile(activities=list(supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA})) as found:
        yield
    found.export_chrome_trace(str(path))
    run.display.say(f"the profile of update {cursor.updates} is in {path.parent}")
