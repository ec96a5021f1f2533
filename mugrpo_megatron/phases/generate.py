"""Generation: weights go to the engines, which draw a stage's prompts from one queue; the verifier scores.

The devices are handed over around it: a device never holds learner and engine in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from uuid import uuid4

from mugrpo_megatron.engine.client import MOST_FAILURES, Engine, PromptSource
from mugrpo_megatron.engine.launch import replayed_routers, training_sampling
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.engine.wire import SampledGroup, Sampling
from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.evaluation.scoring import Scorer
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.environment import device_memory_in_use
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.recipe.functions import load_function
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.leader import EngineLeader, Engines, rendezvous, sleep_joined
from mugrpo_megatron.run.responses import rows_of, stage_prompt
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.run.world import World
from mugrpo_megatron.samples import Prompt
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.check import compare_weights, uncheckable_reason
from mugrpo_megatron.weights.sync import sync

AUXILIARY_TURNS = "mugrpo_megatron.extras.auxiliary.phase:score_stage"
"""What other models than the policy compute of a stage, each with the devices to itself."""


def sync_weights(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """Send the learner's weights to the engines, then give them the devices: a device never holds both in full.

    First the optimizer state is offloaded, the engine's weights wake and are synced, then the learner's weights are
    offloaded and the engine's KV cache wakes. An engine that fails here generates nothing until the next sync.
    """
    leader = engines.leader
    with run.phase("sync", cursor) as facts:
        learner.reload()  # where it is offloaded already: an engine that failed is synced again
        learner.offload("optimizer")
        run.world.barrier()  # an engine spans several ranks' devices; all must have offloaded first
        if engines.nodes > 1 and (ended := rendezvous(run.world, engines.own)) and leader:
            leader.failed(EngineFailure(ended))
        engine = _wake_weights(leader) if leader else None
        run.world.barrier()  # has no timeout, while a collective would time out on an engine that restarts
        try:
            sync(engines.weight_sync, engine, version=cursor.updates)
        except EngineFailure as failure:
            assert leader
            leader.failed(failure)
            engine = None
        _check_weights(run, engines, engine, facts)
        learner.offload("weights")
        run.world.barrier()
        if leader and leader.engine.running:
            _wake_kv_cache(leader)
        facts["bytes"] = float(engines.weight_sync.bytes)
        engines.awake = True


def _check_weights(run: Run, engines: Engines, engine: Engine | None, facts: dict[str, float]) -> None:
    """Compare the engines' weights with the learner's where `engine.check_weights` asks for it. Collective.

    WeightMismatch on every rank ends the run; an engine that fails here generates nothing until the next sync.
    """
    mode, leader = run.recipe.engine.check_weights, engines.leader
    due = leader is not None and engine is not None and (mode == "every" or not leader.checked)
    if mode == "never" or not any(run.world.any_rank(due)):
        return
    try:
        compared = compare_weights(engines.weight_sync, engine if due else None)
    except EngineFailure as failure:
        assert leader
        leader.failed(failure)
        return
    if leader and due and not leader.checked:
        leader.checked = True
        if reason := uncheckable_reason(engines.weight_sync):
            run.display.say(f"The engine's weights are not compared with the learner's: {reason}.")
    facts["checked"] = float(compared)


def _wake_weights(leader: EngineLeader) -> Engine | None:
    """The engine with its weights' memory allocated, restarted where it had failed; None when it does not start."""
    try:
        leader.engine.wake("weights")
        leader.engine.wait_ready()
    except EngineFailure as failure:
        leader.failed(failure)
        return None
    return leader.engine


def _wake_kv_cache(leader: EngineLeader) -> None:
    try:
        leader.engine.wake("kv_cache")
    except EngineFailure as failure:
        leader.failed(failure)


def sleep_engines(world: World, engines: Engines) -> None:
    """Put the engines to sleep; the learner stays offloaded. Collective."""
    engines.awake = False
    if leader := engines.leader:
        try:
            leader.engine.sleep()
        except EngineFailure as failure:  # it was ended, which frees the devices as well
            leader.failed(failure)
    sleep_joined(world, engines)


def generate(run: Run, engines: Engines, stage: StageStore, cursor: Cursor) -> None:
    """Sample and score the groups that the stage still lacks, and seal it. Collective.

    Groups go to disk as they are scored. An engine that fails leaves its unfinished groups to the next round, after
    the sync that restarts it: the stage is then not sealed. Raises EngineFailure on every
    rank after MOST_FAILURES failures of one engine in a row without a finished group between them, and Stopped,
    with every scored group on disk, when the run was asked to stop.
    """
    recipe, leader = run.recipe, engines.leader
    updates = cursor.stage_updates(recipe.schedule)
    groups = range(updates * recipe.rollout.prompts_per_update)
    queue = shared_queue(run.world, sorted(set(groups) - stage.present()) if run.is_main else [])
    scorer = Scorer(leader.verifier, leader.tokenizer) if leader else None
    with (
        run.phase("generate", cursor) as facts,
        run.display.bar(f"{cursor.title(recipe.schedule)}: generate", queue.total, "prompts") as bar,
    ):
        if leader and scorer:
            for group in scorer.during(_sampled(run, leader, cursor, queue, bar)):
                stage.append(rows_of(group, recipe))
            if run.stop.asked:
                stage.flush()  # before it waits: another rank may have died
        run.world.barrier(lambda: show_totals(bar, queue, run.is_main))
        show_totals(bar, queue, run.is_main)
        facts["tokens"] = float(bar.tokens)
        facts["engine_memory"] = max(run.world.gather(_engine_memory(leader)))
        _log_loads(run.world, run.log, leader, cursor)
    with run.phase("score", cursor):
        for group in scorer.rest(run.stop.heard) if scorer else ():
            stage.append(rows_of(group, recipe))
        stage.flush()
        run.world.barrier()
        (stopping,) = run.world.any_rank(run.stop.asked)
        report_failures(run, leader)
        written = run.world.gather(stage.written)
        check_shared(run.world, stage, not run.is_main or stage.wait_for(set().union(*written), sealed=False))
        if run.is_main and not stopping and stage.named().issuperset(groups):
            stage.seal(updates, recipe.rollout.prompts_per_update)
    if any(run.world.any_rank(run.is_main and stage.sealed)):
        check_shared(run.world, stage, stage.wait_for(set(), sealed=True))
    if stopping:
        raise run.stop.all_stopped(
            cursor, f"{len(stage.present())} of {len(groups)} groups of this stage are on disk; "
        )


def run_auxiliary_models(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Have the recipe's auxiliary models compute the columns that the cursor's sealed stage lacks. Collective.

    The policy's engines sleep, and the learner is offloaded where there is something to compute; it stays so.
    """
    if run.recipe.auxiliary.by_name:
        load_function("auxiliary", AUXILIARY_TURNS)(run, learner, stage, cursor)


def shared_queue(world: World, groups: Sequence[int]) -> PromptQueue:
    """The main rank's `groups` as one queue for all engines. Collective; the other ranks' `groups` do not count."""
    name, missing = world.broadcast((uuid4().hex, groups))
    if world.ranks.world == 1:
        return PromptQueue(missing)
    return PromptQueue(missing, world.engines, lambda counter, amount: world.count(f"queue/{name}/{counter}", amount))


def sampled(
    leader: EngineLeader, queue: PromptQueue, take: PromptSource, n: int, how: Sampling, stop: StopRequest
) -> Iterator[SampledGroup]:
    """The groups that this rank's engine takes from the queue, as they are finished.

    Ends early when the engine fails or the run is asked to `stop`; what is in flight is then dropped.
    """
    if leader.engine.running and not stop.heard():
        try:
            with closing(leader.engine.generate_from(take, n, how)) as groups:
                for group in groups:
                    yield group
                    if stop.heard():
                        break
        except EngineFailure as failure:
            leader.failed(failure)
    if stop.asked:
        queue.close()


def report_failures(run: Run, leader: EngineLeader | None) -> None:
    """Say which engines failed since the last call; each is restarted at the next sync. Collective.

    Raises EngineFailure on every rank after MOST_FAILURES failures of one engine in a row.
    """
    mine = None
    if leader and leader.failure:
        mine, leader.failure = (str(leader.failure), leader.failures_in_a_row), None
    for rank, report in enumerate(run.world.gather(mine)):
        if report is None:
            continue
        text = f"rank {rank}: {report[0]}" if run.world.ranks.world > 1 else report[0]
        if report[1] >= MOST_FAILURES:
            raise EngineFailure(text)
        run.log.event("engine_failure", text.splitlines()[0])
        run.display.say(f"{text}\nThe engine is restarted for what is missing.")


def _sampled(run: Run, leader: EngineLeader, cursor: Cursor, queue: PromptQueue, bar: Bar) -> Iterator[SampledGroup]:
    """`sampled` for the stage at `cursor`; counts finished groups, and leaves the queue where the engine fails."""
    recipe = run.recipe

    def take(waiting: int, slots: int) -> list[Prompt]:
        return [stage_prompt(recipe, leader.problems, cursor, g) for g in queue.take(waiting, slots)]

    how = training_sampling(
        recipe.rollout, recipe.run, leader.tokenizer, replayed_routers(recipe.learner, recipe.model)
    )
    for prompt, responses in sampled(leader, queue, take, recipe.rollout.responses_per_prompt, how, run.stop):
        leader.failures_in_a_row = 0
        yield SampledGroup(prompt, responses)
        queue.finished(sum(len(response.ids) for response in responses))
        show_totals(bar, queue, run.is_main)
    if not leader.engine.running:
        queue.leave()


def _engine_memory(leader: EngineLeader | None) -> float:
    """Bytes of this rank's engine, as the metric `engine_memory` counts them; 0 without an engine."""
    if leader is None:
        return 0.0
    return device_memory_in_use() or leader.engine.memory


def _log_loads(world: World, log: MetricLog, leader: EngineLeader | None, cursor: Cursor) -> None:
    """Log the engines' loads during the generation that has just ended. Collective."""
    mine = (leader.slot.number, leader.engine.load_record.loads) if leader else (0, [])
    for engine, loads in world.gather(mine):
        for load in loads:
            log.engine(cursor.stage, engine, load.time, load.metrics())


def show_totals(bar: Bar, queue: PromptQueue, is_main: bool) -> None:
    """Advance the main rank's bar to what all engines have finished of the queue."""
    if is_main:
        groups, tokens = queue.totals()
        bar.advance(groups - bar.done, tokens - bar.tokens)


def check_shared(world: World, stage: StageStore, seen: bool) -> None:
    """UserError on every rank when one of them does not see what another has written. Collective."""
    blind = [rank for rank, sees in enumerate(world.gather(seen)) if not sees]
    if blind:
        raise UserError(
            f"rank {blind[0]} does not see what other ranks have written to {stage.directory}: put run.dir on a "
            "file system that all nodes share, under the same path"
        )
