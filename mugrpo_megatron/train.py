"""mu-GRPO: a few large sequential stages of generate -> optimize (arXiv 2605.17570)."""

from __future__ import annotations

import numpy as np

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.anchor import compute_anchor, training_rewards
from mugrpo_megatron.phases.evaluate import evaluate_before_stage, evaluate_inside_stage, evaluate_meanwhile
from mugrpo_megatron.phases.finish import finish, show_finished
from mugrpo_megatron.phases.generate import generate
from mugrpo_megatron.phases.optimize import optimizing, record_stage, record_update
from mugrpo_megatron.phases.passes import record_behaviour, refresh_reference
from mugrpo_megatron.phases.prefetch import offer_next_stage, take_offered_stage
from mugrpo_megatron.phases.samples import read_update
from mugrpo_megatron.phases.saves import profiled, save_if_due
from mugrpo_megatron.phases.sync import sleep_engines, sync_weights
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor, stage_exhausted
from mugrpo_megatron.run.run import Engines, Run, open_run
from mugrpo_megatron.stages.store import StageStore


def train(recipe: Recipe, found: Problems | None = None, ahead: HostProcess | None = None) -> None:
    """S stages of µ updates each, with one objective.

    Schedule and objective together make the method: mu-GRPO is S=4, µ=1024 with the objective `mu_grpo`, ordinary GRPO
    S=1024, µ=4 with `grpo`. GRPO's objective at µ=1024 is the paper's failing baseline (arXiv 2605.17570, Table 1).

    Every rank of the world runs this function. A run directory that holds an unfinished run is continued. `found` are
    the problems where they were read before, `ahead` the engine's process where it was started before.
    """
    if show_finished(recipe):
        return
    with open_run(recipe, found=found, ahead=ahead) as (run, learner, engines, cursor):
        while not cursor.finished(recipe.schedule):
            generate_stage(run, learner, engines, cursor)
            cursor = optimize_stage(run, learner, engines, cursor)
        finish(run, learner, engines, cursor)


def generate_stage(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """The engines generate all responses of the next µ updates with the learner's current weights.

    With `schedule.prefetch` other processes have begun while the stage before was trained on; the learner takes theirs.
    """
    take_offered_stage(run, learner, engines, cursor)
    stage = run.stage_store(cursor, engines.writer)
    if stage.sealed:
        evaluate_meanwhile(run, learner, engines, cursor)  # unless that was done when it was generated
    while not stage.sealed:  # one pass, unless an engine fails and is restarted
        sync_weights(run, learner, engines, cursor)  # learner -> bridge -> engine
        evaluate_before_stage(run, engines, cursor)
        generate(run, engines, stage, cursor)  # engine -> verifier -> stage store
        sleep_engines(run, learner, engines)


def optimize_stage(run: Run, learner: Learner, engines: Engines, start: Cursor) -> Cursor:
    """µ updates on one stage, from `start` on, `schedule.passes` times; its responses grow stale on the way.

    Relaxed clipping keeps their gradients, and the negative-advantage veto drops the part of a response that the
    policy would no longer produce. Returns where the next stage begins.
    """
    stage, cursor = run.stage_store(start), start
    record_stage(run, learner, stage, cursor)
    record_behaviour(run, learner, stage, cursor)
    compute_anchor(run, learner, stage, cursor)  # where `objective.kl_anchor` asks for it
    while cursor.stage == start.stage:
        evaluate_inside_stage(run, learner, engines, cursor)  # where `eval.every_updates` asks for it
        with optimizing(run, cursor) as bar:
            cursor = take_updates(run, learner, stage, cursor, bar)
    return cursor


def take_updates(run: Run, learner: Learner, stage: StageStore, start: Cursor, bar: Bar) -> Cursor:
    """The updates from `start` to the stage's end, or to the next evaluation inside it."""
    schedule, cursor = run.recipe.schedule, start
    while True:
        offer_next_stage(run, stage, cursor, resumed=cursor == start)  # where `schedule.prefetch` asks for it
        refresh_reference(run, learner, stage, cursor)
        samples = read_update(run, stage, cursor)
        rewards = training_rewards(samples, run.recipe.objective)
        groups = np.array([sample.group for sample in samples])
        advantages = group_advantages(rewards, groups, run.recipe.objective)
        with profiled(run, cursor):
            metrics = update(learner, samples, advantages, cursor.of_stage(schedule, stage.updates))
        record_update(run, learner, cursor, samples, metrics, bar)
        exhausted = schedule.ends_early and run.world.any_rank(stage_exhausted(metrics, schedule))[0]
        cursor = cursor.advanced(schedule, stage.updates, exhausted)
        save_if_due(run, cursor)
        if cursor.stage > start.stage or cursor.due(run.evaluates_every):
            return cursor
