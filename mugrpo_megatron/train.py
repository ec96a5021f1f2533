"""mu-GRPO: a few large sequential stages of generate -> optimize (arXiv 2605.17570)."""

from __future__ import annotations

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.checks.preflight import check_run
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.phases.evaluate import evaluate_if_due
from mugrpo_megatron.phases.generate import (
    generate,
    run_auxiliary_models,
    sleep_engines,
    sync_weights,
)
from mugrpo_megatron.phases.saves import finish
from mugrpo_megatron.phases.stage import open_stage
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.run import Cursor, Engines, Learner, Run, open_run


def train(recipe: Recipe) -> None:
    """S stages of µ updates each, with one objective.

    Schedule and objective together make the method: mu-GRPO is S=4, µ=1024 with the objective `mu_grpo`, ordinary GRPO
    S=1024, µ=4 with `grpo`. GRPO's objective at µ=1024 is the paper's failing baseline (arXiv 2605.17570, Table 1).

    Every rank of the world runs this function. A run directory that holds an unfinished run is continued. Raises
    UserError before any process starts when the model, the data or the layout cannot work.
    """
    recipe, problems = check_run(recipe)
    with open_run(recipe, problems) as (run, learner, engines, cursor):
        train_stages(run, learner, engines, cursor)


def train_stages(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """The stages that are left of the run, and its results."""
    while not cursor.finished(run.recipe.schedule):
        generate_stage(run, learner, engines, cursor)
        cursor = optimize_stage(run, learner, engines, cursor)
    finish(run, learner, engines, cursor)


def generate_stage(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """The engines generate all responses of the next µ updates with the learner's current weights."""
    stage = run.stage_store(cursor, engines.writer)
    while not stage.sealed:  # one pass, unless an engine fails and is restarted
        sync_weights(run, learner, engines, cursor)  # learner -> bridge -> engine
        evaluate_if_due(run, learner, engines, cursor)
        generate(run, engines, stage, cursor)  # engine -> verifier -> stage store
        sleep_engines(run.world, engines)
    run_auxiliary_models(run, learner, stage, cursor)  # a teacher, a judge: stage -> column
    learner.reload()


def optimize_stage(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> Cursor:
    """µ updates on one stage, from the cursor on, `schedule.epochs` times; its responses grow stale on the way.

    Relaxed clipping keeps their gradients, and the negative-advantage veto drops the part of a response that the
    policy would no longer produce. Returns where the next stage begins.
    """
    with open_stage(run, learner, cursor) as stage:  # with its columns: behaviour, ref, teacher
        for cursor in stage.cursors():
            evaluate_if_due(run, learner, engines, cursor)
            batch = stage.batch(cursor)
            advantages = group_advantages(batch.rewards, batch.groups, run.recipe.objective)
            metrics = update(learner, batch.samples, advantages, batch.stage_progress)
            stage.record(cursor, batch, metrics)
            stage.save_if_due()
    return stage.cursor
