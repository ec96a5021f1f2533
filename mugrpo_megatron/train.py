"""mu-GRPO: a few large sequential stages of generate -> optimize (arXiv 2605.17570)."""

from __future__ import annotations

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.phases.generate import open_generation
from mugrpo_megatron.phases.saves import finish
from mugrpo_megatron.phases.stage import open_stage
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.run import Cursor, Engines, Learner, Run, open_run


def train(recipe: Recipe, problems: Problems | None, host: HostProcess | None = None) -> None:
    """S stages of µ updates each, with one objective; what `mugrpo train` runs, on every rank.

    Schedule and objective together make the method: mu-GRPO is S=4, µ=1024 with the objective `mu_grpo`, ordinary GRPO
    S=1024, µ=4 with `grpo`. GRPO's objective at µ=1024 is the paper's failing baseline (arXiv 2605.17570, Table 1).

    `checks.preflight.check_run` has checked the recipe and read the problems; `host` is the engine's process where it
    was started before. A run directory that holds an unfinished run is continued.
    """
    with open_run(recipe, problems, host) as (run, learner, engines, cursor):
        while not cursor.finished(recipe.schedule):
            generate_stage(run, learner, engines, cursor)
            cursor = optimize_stage(run, learner, engines, cursor)
        finish(run, learner, engines, cursor)


def generate_stage(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """The engines generate all responses of the next µ updates with the learner's current weights."""
    with open_generation(run, learner, engines, cursor) as generation:
        while not generation.sealed:  # one round, unless an engine fails and is restarted
            generation.sync_weights()  # learner -> engine
            generation.evaluate_if_due()
            generation.sample()  # engine -> verifier -> stage store
            generation.sleep_engines()
        generation.run_auxiliary_models()  # a teacher, a judge: stage -> column


def optimize_stage(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> Cursor:
    """µ updates on one stage, from the cursor on, `schedule.epochs` times; its responses grow stale on the way.

    Relaxed clipping keeps their gradients, and the negative-advantage veto drops the part of a response that the
    policy would no longer produce. Returns where the next stage begins.
    """
    with open_stage(run, learner, engines, cursor) as stage:  # with its columns: behaviour, ref, teacher
        while stage.holds(cursor):
            stage.evaluate_if_due(cursor)
            batch = stage.batch(cursor)
            advantages = group_advantages(batch.rewards, batch.groups, run.recipe.objective, batch.samples)
            metrics = update(learner, batch.samples, advantages, batch.stage_progress)  # clip, veto, head: fused
            stage.record(cursor, batch, metrics)
            cursor = stage.next_cursor(cursor, batch, metrics)
            stage.save_if_due(cursor)
    return cursor
