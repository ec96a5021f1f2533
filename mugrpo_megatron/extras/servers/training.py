"""`mugrpo train --server`: the loop of `train` with servers in place of engines.

The learner keeps its devices: nothing is put to sleep or woken, and no weights are sent. After each stage `hf/` holds
the new weights; the servers load them there, or from a copy, and the next stage waits until they serve them by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from mugrpo_megatron.data.prepare import PreparedData, Problems, prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.servers.attest import Values
from mugrpo_megatron.extras.servers.attested import Attestor
from mugrpo_megatron.extras.servers.filling import (
    Filling,
    ServerOptions,
    check_servers,
    how_to_serve,
    request_for,
    weights_name,
)
from mugrpo_megatron.extras.servers.learner_values import learner_values
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.phases.saves import export, finish
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.opening import open_run
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.train import optimize_stage


def train_with_servers(recipe: Recipe, problems: Problems | None, options: ServerOptions) -> None:
    """Fill the run's stages from servers and train on them; `mugrpo train --server` calls this on every rank.

    `problems` are given on rank 0 alone, which sends the requests. No evaluations take place.
    """
    check_servers(recipe)
    if recipe.auxiliary.by_name:
        raise UserError(
            "auxiliary: a teacher or a judge runs in an engine on this machine, and `mugrpo train --server` starts "
            "none; for each stage run `mugrpo generate --server`, `mugrpo seal`, `mugrpo generate --engine-only`, "
            "which lets them score the stage, and `mugrpo optimize`"
        )
    prepared = None
    if problems:
        prepared = prepare(recipe.data, recipe.reward, load_tokenizer(recipe.model.directory), problems)
    with open_run(recipe, problems, generates=False) as (run, learner, engines, cursor):
        while not cursor.finished(recipe.schedule):
            fill_stage(run, learner, cursor, prepared, options)
            cursor = optimize_stage(run, learner, engines, cursor)
            export(run, learner, cursor)
        finish(run, learner, cursor)


def fill_stage(
    run: Run, learner: Learner, cursor: Cursor, problems: PreparedData | None, options: ServerOptions
) -> None:
    """Have servers fill the cursor's stage, and seal it. Collective.

    Rank 0 sends the requests. The other ranks wait, and take part when the learner computes log-probabilities. Raises
    UserError when no server can be used, and Stopped, with every group on disk, when the run was asked to stop.
    """
    store = run.stage_store(cursor)
    groups = range(cursor.updates_sampled(run.recipe.schedule) * run.recipe.rollout.prompts_per_update)
    if run.world.broadcast(store.sealed):
        return
    with run.phase("generate", cursor) as facts:
        if run.is_main and problems:
            facts["tokens"] = _fill(run, learner, cursor, problems, options, store, groups)
            run.world.barrier()
            run.world.broadcast(None)
        else:
            _follow(run, learner)
    run.stop_if_asked(cursor, f"{len(store.verified_groups())} of {len(groups)} groups of this stage are on disk")
    if run.is_main:
        store.seal(len(groups) // run.recipe.rollout.prompts_per_update, run.recipe.rollout.prompts_per_update)
    run.world.barrier()
    if not store.wait_for(set(), sealed=True):
        raise UserError(f"{store.directory} is not visible on every node: put run.dir on a file system that all share")


def _fill(
    run: Run,
    learner: Learner,
    cursor: Cursor,
    problems: PreparedData,
    options: ServerOptions,
    store: StageStore,
    groups: range,
) -> float:
    """Fill the stage on rank 0; returns the number of tokens of the new responses."""
    recipe, world = run.recipe, run.world

    def measure(samples: Sequence[Sample], temperature: float) -> Values:
        world.barrier()
        world.broadcast((samples, temperature))
        return learner_values(learner, samples, temperature)

    weights = run.directory.hf if cursor.updates else recipe.model.directory
    name = weights_name(run.record.id, cursor.updates)
    tokenizer = load_tokenizer(recipe.model.directory)
    missing = sorted(set(groups) - store.verified_groups())
    run.display.say(how_to_serve(name, weights, recipe.model.dtype))
    with ExitStack() as stack:
        verifier = stack.enter_context(Verifier(recipe.reward))
        bar = stack.enter_context(
            run.display.bar(f"{cursor.title(recipe.schedule)}: generate", len(missing), "prompts")
        )
        request = request_for(recipe, name, recipe.model.directory, tokenizer, cursor, options)
        attestor = Attestor(
            measure, recipe.rollout.temperature, recipe.model.dtype, store.directory / "servers-0000.json"
        )
        filling = Filling(recipe, problems, tokenizer, cursor, store, verifier, run.stop, run.display.say)
        filling.fill(request, options, missing, attestor, bar)
        return float(bar.tokens)


def _follow(run: Run, learner: Learner) -> None:
    """Take part in each computation of the learner that rank 0 begins, until rank 0 sends None."""
    while True:
        run.world.barrier()
        asked = run.world.broadcast(None)
        if asked is None:
            return
        learner_values(learner, *asked)
