"""Saves the state of a run, and writes its results: the Hugging Face checkpoint, summary.json and report.html."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.environment import process_seconds, rank_of_environment
from mugrpo_megatron.observe.health import HealthWarning
from mugrpo_megatron.observe.progress import Display, duration, open_display
from mugrpo_megatron.observe.results import summarize, summary_table
from mugrpo_megatron.report.page import FILE_NAME, write_report
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import PROVENANCE, check_hf, provenance
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.weights.hf import save_hf


def save_if_due(run: Run, cursor: Cursor) -> None:
    """Save the learner's full state after an update, if the recipe or a request to stop asks for it. Collective.

    `cursor` is the position after that update, at which a resumed run continues. The recipe asks for a save at the end
    of every `checkpoint.every_stages`-th stage and of the last one, and after every `checkpoint.every_updates`-th
    update of a stage. A run without engines, which takes the updates of one stage, always saves at its end. A save at
    the end of a stage other than the last writes `hf/` too. Raises Stopped, with everything saved, when the run was
    asked to stop.

    A run that is killed loses only the updates since its last save: its sealed stages stay, so a resumed run need not
    generate them again.
    """
    section, stage_ends = run.recipe.checkpoint, cursor.age == 0
    last = cursor.finished(run.recipe.schedule) or (stage_ends and not run.world.engines)
    due = last or cursor.stage % section.every_stages == 0 if stage_ends else cursor.due(section.every_updates)
    stopping = run.world.any_rank(run.stop.requested)
    saves = stopping or due
    if saves:
        _check_on_main(run, run.directory.check_lock)
        with run.phase("save", cursor):
            run.saver.save(cursor)
            if stage_ends and not last:
                write_hf(run, cursor)
    if stopping:
        run.save_and_stop(cursor)


def write_hf(run: Run, cursor: Cursor) -> None:
    """Write the policy to `hf/`, in place of an earlier one. Collective.

    With `checkpoint.asynchronous` training continues once the weights are copied to host memory. Engine-only
    processes sample from `hf/`. Raises UserError when `hf/` has become something that this run has not written.
    """
    check_own_hf(run)
    notes = {PROVENANCE: provenance(run.record, asdict(cursor))}
    run.saver.save_hf(run.recipe.model.directory, run.directory.hf, notes)


def check_own_hf(run: Run) -> None:
    """Raise UserError on every rank if the run must not replace its `hf/`. Collective."""

    def check() -> None:
        run.directory.check_lock()
        check_hf(run.directory.hf, run.record)

    _check_on_main(run, check)


def _check_on_main(run: Run, check: Callable[[], None]) -> None:
    """Run the check on the main rank; raise its UserError on every rank. Collective."""
    refusal = ""
    if run.is_main:
        try:
            check()
        except UserError as error:
            refusal = f"{error}; the checkpoint was not written: correct this, and the same command writes it"
    if refusal := run.world.broadcast(refusal):
        raise UserError(refusal)


def show_finished(directory: RunDirectory) -> None:
    """Show, on the main rank, the results of a run that an earlier process has finished."""
    with open_display(show=rank_of_environment() == 0) as display:
        display.say(f"{directory.path} is finished; choose another run.dir for a new run")
        show(directory, display)


def show(directory: RunDirectory, display: Display) -> None:
    """Print a finished run's table and the paths of its results."""
    summary = summarize(directory.path)
    display.table(summary_table(summary))
    for sign in summary.get("health_warnings", ()):
        display.say(HealthWarning(**sign).line)
    display.say(f"Hugging Face checkpoint: {directory.hf}\nreport: {directory.path / FILE_NAME}")


def finish(run: Run, learner: Learner, cursor: Cursor) -> None:
    """Write the run's results and show them. Collective."""
    write_results(run, learner, cursor)
    if run.is_main:
        show(run.directory, run.display)
        run.display.say(
            f"this command has taken {duration(process_seconds())}, with imports and checks, which the total leaves out"
        )


def write_results(run: Run, learner: Learner, cursor: Cursor) -> None:
    """Write the trained policy, summary.json and the report. Collective."""
    export(run, learner, cursor)
    if run.is_main:
        write_json(run.directory.summary, summarize(run.directory.path))
        write_report(run.directory.path)


def export(run: Run, learner: Learner, cursor: Cursor) -> None:
    """Write the policy as a Hugging Face checkpoint, in place of an earlier stage's. Collective.

    Raises UserError, with the run's checkpoints kept, when `hf/` has become something that this run has not written.
    """
    check_own_hf(run)
    run.saver.wait()  # a checkpoint may still be being written
    so_far = f"all updates are saved, {run.directory.hf} is not written yet"
    with run.phase("save", cursor), run.stop.at_once(so_far):
        save_hf(
            learner.models,
            learner.architecture,
            like=run.recipe.model.directory,
            out=run.directory.hf,
            replace=True,
            notes={PROVENANCE: provenance(run.record, asdict(cursor)), **learner.adapter_files()},
        )
        run.world.barrier()
