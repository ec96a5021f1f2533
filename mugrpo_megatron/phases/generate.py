"""Generation of a stage: the engines draw its prompts from one queue, the verifier scores, the stage is sealed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mugrpo_megatron.engine.launch import replayed_routers, training_sampling
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.engine.wire import SampledGroup
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.evaluation.scoring import Scorer
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.environment import device_memory_in_use
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.handover import (
    report_failures,
    sample_groups,
    shared_queue,
    show_totals,
)
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.engines import Engines, Leader
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stage_groups import group_prompt, group_samples
from mugrpo_megatron.run.world import World
from mugrpo_megatron.samples import Prompt
from mugrpo_megatron.stages.store import StageStore


def sample(run: Run, engines: Engines, stage: StageStore, cursor: Cursor) -> None:
    """Sample and score the groups that the cursor's stage lacks, and seal it once it is complete. Collective.

    Groups go to disk as they are scored. An engine that fails leaves its unfinished groups to the next round, after it
    was started again: the stage is then not sealed. Raises EngineFailure on every rank after MOST_FAILURES failures of
    one engine in a row without a finished group between them, and Stopped, with every scored group on disk, when the
    run was asked to stop.
    """
    leader, recipe = engines.leader, run.recipe
    groups = range(cursor.stage_updates(recipe.schedule) * recipe.rollout.prompts_per_update)
    # Rank 0 alone looks at the disk: a shared file system may show the ranks different states.
    missing = sorted(set(groups) - stage.verified_groups()) if run.is_main else []
    queue = shared_queue(run.world, missing)
    scorer = Scorer(leader.verifier, leader.tokenizer) if leader else None
    to_samples = partial(group_samples, rollout=recipe.rollout, reward=recipe.reward, objective=recipe.objective)
    with (
        run.phase("generate", cursor) as facts,
        run.display.bar(f"{cursor.title(recipe.schedule)}: generate", queue.total, "prompts") as bar,
    ):
        if leader and scorer:
            for group in scorer.during(_sample_stage(run, leader, cursor, queue, bar)):
                stage.append(to_samples(group))
            if run.stop.requested:
                stage.flush()  # before the barrier: another rank may have died
        # Heartbeats instead of a collective: a long generation would exceed its timeout (ProcessGroupNCCL).
        run.world.barrier(lambda: show_totals(bar, queue, run.is_main))
        show_totals(bar, queue, run.is_main)
        facts["tokens"] = float(bar.tokens)
        memory = device_memory_in_use() or leader.engine.memory if leader else 0.0
        facts["engine_memory"] = max(run.world.gather(memory))
        _log_loads(run.world, run.log, leader, cursor)
    with run.phase("score", cursor):
        # Scores that are still computed when the engine has finished; a verifier may be slower than the engine.
        for group in scorer.rest(run.stop.poll) if scorer else ():
            stage.append(to_samples(group))
        stage.flush()
        run.world.barrier()
        stopping = run.world.any_rank(run.stop.requested)
        report_failures(run, leader)
        _seal_if_complete(run, stage, groups, stopping)
    if stopping:
        run.save_and_stop(cursor, f"{len(stage.verified_groups())} of {len(groups)} groups of this stage are on disk; ")


def _seal_if_complete(run: Run, stage: StageStore, groups: range, stopping: bool) -> None:
    """The main rank seals the stage; every other rank waits until it sees that on the shared file system."""
    groups_of_writers = run.world.gather(stage.own_groups)
    sees_all = not run.is_main or stage.wait_for(set().union(*groups_of_writers), sealed=False)
    check_shared(run.world, stage, sees_all)
    # One rank seals: engines write shards and manifests of their own, the sealed file has a single writer.
    if run.is_main and not stopping and stage.listed_groups().issuperset(groups):
        per_update = run.recipe.rollout.prompts_per_update
        stage.seal(len(groups) // per_update, per_update)
    if run.world.any_rank(run.is_main and stage.sealed):
        check_shared(run.world, stage, stage.wait_for(set(), sealed=True))


def run_auxiliary_models(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Have the recipe's auxiliary models compute the columns that the sealed stage lacks. Collective.

    The policy's engines sleep, and the learner is offloaded where there is something to compute; it stays so.
    """
    if run.recipe.auxiliary.by_name:
        from mugrpo_megatron.extras.auxiliary.phase import score_stage

        score_stage(run, learner, stage, cursor)


def _sample_stage(run: Run, leader: Leader, cursor: Cursor, queue: PromptQueue, bar: Bar) -> Iterator[SampledGroup]:
    """Yields the groups of the cursor's stage that this rank's engine finishes; one that fails leaves the queue."""
    recipe = run.recipe

    def take(waiting: int, slots: int) -> list[Prompt]:
        return [group_prompt(recipe, leader.problems, cursor, g) for g in queue.take(waiting, slots)]

    routers = replayed_routers(recipe.learner, recipe.model)
    how = training_sampling(recipe.rollout, recipe.run, leader.tokenizer, routers)
    for prompt, responses in sample_groups(leader, queue, take, recipe.rollout.responses_per_prompt, how, run.stop):
        leader.failures_in_a_row = 0
        yield SampledGroup(prompt, responses)
        queue.finished(sum(len(response.ids) for response in responses))
        show_totals(bar, queue, run.is_main)
    if not leader.engine.running:
        queue.leave()


def _log_loads(world: World, log: MetricLog, leader: Leader | None, cursor: Cursor) -> None:
    """Log the engines' loads during the generation that has just ended. Collective."""
    mine = (leader.slot.number, leader.engine.load_record.loads) if leader else (0, [])
    for engine, loads in world.gather(mine):
        for load in loads:
            log.engine(cursor.stage, engine, load.time, load.metrics())


def check_shared(world: World, stage: StageStore, seen: bool) -> None:
    """UserError on every rank when one of them does not see what another has written. Collective."""
    blind = [rank for rank, sees in enumerate(world.gather(seen)) if not sees]
    if blind:
        raise UserError(
            f"rank {blind[0]} does not see what other ranks have written to {stage.directory}: put run.dir on a "
            "file system that all nodes share, under the same path"
        )
