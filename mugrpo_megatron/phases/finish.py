"""The end of a run: the last evaluation, the Hugging Face checkpoint, summary.json and report.html."""

from __future__ import annotations

from dataclasses import asdict

from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.phases.evaluate import evaluate_weights
from mugrpo_megatron.phases.finished import show
from mugrpo_megatron.phases.hf import check_own_hf
from mugrpo_megatron.report.report import write_report
from mugrpo_megatron.report.summary import summarize
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.record import MARK, mark
from mugrpo_megatron.run.run import Engines, Run
from mugrpo_megatron.weights.hf import save_hf


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
    kept = f"all updates are saved, {run.directory.hf} is not written yet"
    with run.log.phase("save", cursor.stage), run.stop.at_once(kept):
        chunks = [policy(chunk) for chunk in learner.chunks]
        save_hf(
            chunks,
            learner.architecture,
            like=run.recipe.model.directory,
            out=run.directory.hf,
            replace=True,
            notes={MARK: mark(run.record, asdict(cursor))},
        )
        run.world.barrier()
