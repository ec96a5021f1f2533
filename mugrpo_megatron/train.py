"""mu-GRPO (arXiv 2605.17570): reinforcement learning in a few large stages of generate -> optimize.

What it takes away from GRPO as it is usually run:

1. Fresh responses. The responses of µ updates, 1,024 in the paper, are sampled at once; S stages, 4 in the paper,
   follow one another. They grow stale by up to µ updates, and learner and engines change places S times in all.
2. The clip range [0.8, 1.2]. It would stop the gradients of stale responses; [0, 5] keeps them.
3. The end of a bad response that the policy no longer produces. In a response with negative advantage, the veto drops
   from the loss the tokens after the first one whose importance ratio is below 10⁻⁴, except later ones below 10⁻⁴.
4. The reference model and its KL penalty.

Schedule and objective together make the method. Ordinary GRPO is the same loop with S=1,024, µ=4 and the objective
`grpo`; GRPO's objective at µ=1,024 is the paper's failing baseline (Table 1).
"""

from __future__ import annotations

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.phases.agreement import check_agreement, expected_logprobs
from mugrpo_megatron.phases.evaluate import evaluate, evaluation_due, is_evaluated
from mugrpo_megatron.phases.generate import run_auxiliary_models, sample, seal_if_complete, whole_stage
from mugrpo_megatron.phases.saves import finish, save_if_due
from mugrpo_megatron.phases.stage import open_stage
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.engines import Engines
from mugrpo_megatron.run.opening import open_run
from mugrpo_megatron.run.run import Run


def train(recipe: Recipe, problems: Problems | None, host: HostProcess | None = None) -> None:
    """Train for S stages of µ updates each, with one objective: what `mugrpo train` runs on every rank.

    An unfinished run in `run.dir` is continued. `checks.preflight.check_run` has checked the recipe and read the
    problems before. `host` is the engine's host process if one was started before this call.
    """
    with open_run(recipe, problems, host) as (run, learner, engines, cursor):
        while not cursor.finished(recipe.schedule):
            generate_stage(run, learner, engines, cursor)
            cursor = optimize_stage(run, learner, engines, cursor)
        evaluate_policy(run, learner, engines, cursor)
        finish(run, learner, cursor)


def generate_stage(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """The engines generate all responses of the next µ updates with the learner's current weights."""
    stage, whole = run.stage_store(cursor, engines.writer), whole_stage(run.recipe, cursor)
    while not stage.sealed:  # once, unless an engine fails and is started again
        hand_over(run, learner, engines, cursor)
        if evaluation_due(run, cursor):
            evaluate(run, engines.leader, cursor)
        sample(run, engines.leader, stage, whole)  # engine -> verifier -> stage on disk
        seal_if_complete(run, stage, whole)
        engines.sleep()
    run_auxiliary_models(run, learner, stage, cursor)  # a teacher or a judge adds a column to the stage
    learner.reload()


def optimize_stage(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> Cursor:
    """Take the stage's remaining updates: µ in each of `schedule.epochs` passes, on responses that grow more stale.

    Returns the cursor at which the next stage begins.
    """
    with open_stage(run, learner, cursor) as stage:
        stage.compute_columns(cursor)  # behaviour, ref: a forward pass over the stage for each column that it lacks
        stage.record_start(cursor)  # how far engine and learner differ; a forward pass over a few responses
        while stage.holds(cursor):
            if evaluation_due(run, cursor):
                stage.pause()
                evaluate_policy(run, learner, engines, cursor)
            stage.refresh_proximal(cursor)  # for a decoupled clip: a forward pass every few updates
            batch = stage.batch(cursor)
            advantages = group_advantages(batch.rewards, batch.groups, run.recipe.objective, batch.samples)
            with stage.measured(cursor):
                metrics = update(learner, batch.samples, advantages, batch.stage_progress)  # loss, gradients, step
            stage.record(cursor, batch, metrics)
            cursor = stage.next_cursor(cursor, batch, metrics)
            save_if_due(run, cursor)
    return cursor


def evaluate_policy(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """The engines take the devices to evaluate the current weights, unless these have been evaluated already."""
    while not is_evaluated(run, cursor):  # once, unless an engine fails and is started again
        run.stop_if_asked(cursor)
        hand_over(run, learner, engines, cursor)
        evaluate(run, engines.leader, cursor)
        engines.sleep()
        learner.reload()


def hand_over(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """The engines get the devices and the learner's weights. No device ever holds all of the learner and all of the
    engine."""
    with run.phase("sync", cursor) as facts:
        learner.reload()  # still offloaded if an engine failed after the last hand-over
        expected = expected_logprobs(run, learner, engines)  # of a few texts, until every engine has agreed once
        learner.offload("optimizer")
        engines.wake("weights")
        facts |= engines.receive(cursor.updates)  # learner -> engine, bucket by bucket
        learner.offload("weights")
        engines.wake("kv_cache")
        facts |= check_agreement(run, engines, expected)  # ends the run if the two compute different models
