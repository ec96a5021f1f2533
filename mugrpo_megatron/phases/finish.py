"""The end of a run: the last evaluation, the Hugging Face checkpoint, summary.json and report.html."""

from __future__ import annotations

from dataclasses import asdict

from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.environment import rank_of_environment
from mugrpo_megatron.observe.health import Sign
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.observe.results import summarize, summary_table
from mugrpo_megatron.phases.evaluate import evaluate_weights
from mugrpo_megatron.phases.saves import check_own_hf
from mugrpo_megatron.report.page import FILE_NAME, write_report
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.leader import Engines
from mugrpo_megatron.run.record import MARK, mark
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.weights.hf import save_hf


def show_finished(directory: RunDirectory) -> None:
    """The main rank shows the results of a run that was finished before."""
    with open_display(show=rank_of_environment() == 0) as display:
        display.say(f"{directory.path} is finished; choose another run.dir for a new run")
        show(directory, display)


def show(directory: RunDirectory, display: Display) -> None:
    """Print a finished run's table and the paths of its results."""
    summary = summarize(directory.path)
    display.table(summary_table(summary))
    for sign in summary.get("signs", ()):
        display.say(Sign(**sign).line)
    display.say(f"Hugging Face checkpoint: {directory.hf}\nreport: {directory.path / FILE_NAME}")


def finish(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """Evaluate the trained policy, write the run's results and show them."""
    conclude(run, learner, engines, cursor)
    if run.is_main:
        show(run.directory, run.display)


def conclude(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """Evaluate the trained policy and write the run's results."""
    evaluate_weights(run, learner, engines, cursor)
    export(run, learner, cursor)
    if run.is_main:
        write_json(run.directory.summary, summarize(run.directory.path))
        write_report(run.directory.path)


def export(run: Run, learner: Learner, cursor: Cursor) -> None:
    """Write the policy as a Hugging Face checkpoint, in place of an earlier stage's. Collective.

    Raises UserError, with the run's checkpoints kept, when something else has come to lie there.
    """
    check_own_hf(run)
    run.saver.wait()  # for one that is still written beside training
    so_far = f"all updates are saved, {run.directory.hf} is not written yet"
    with run.log.phase("save", cursor.stage), run.stop.at_once(so_far):
        save_hf(
            learner.models,
            learner.architecture,
            like=run.recipe.model.directory,
            out=run.directory.hf,
            replace=True,
            notes={MARK: mark(run.record, asdict(cursor)), **learner.adapter_files()},
        )
        run.world.barrier()
