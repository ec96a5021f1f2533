"""The engines' turn: they get the weights, sample from one queue of prompts, for a stage or an evaluation, and sleep.

A device never holds learner and engine in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from uuid import uuid4

from mugrpo_megatron.engine.client import MOST_FAILURES, Engine, PromptSource
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.engine.wire import SampledGroup, Sampling
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.leader import EngineLeader, Engines, rendezvous
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.run.world import World
from mugrpo_megatron.weights.check import compare_weights, uncheckable_reason
from mugrpo_megatron.weights.sync import sync


def sync_weights(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """Send the learner's weights to the engines and give them the devices. Collective.

    A device never holds both in full: the optimizer state is offloaded, the engine's weights wake and are synced, the
    learner's weights are offloaded, the engine's KV cache wakes. An engine that fails here samples nothing until the
    next sync.
    """
    leader = engines.leader
    with run.phase("sync", cursor) as facts:
        learner.reload()  # it is offloaded where an engine failed and is synced again
        learner.offload("optimizer")
        run.world.barrier()  # an engine spans several ranks' devices; all must have offloaded first
        if engines.nodes > 1 and (ended := rendezvous(run.world, engines.local)) and leader:
            leader.record_failure(EngineFailure(ended))
        engine = _wake_weights(leader) if leader else None
        run.world.barrier()  # has no timeout, while a collective would time out on an engine that restarts
        try:
            sync(engines.weight_sync, engine, version=cursor.updates)
        except EngineFailure as failure:
            assert leader
            leader.record_failure(failure)
            engine = None
        _check_weights(run, engines, engine, facts)
        learner.offload("weights")
        run.world.barrier()
        if leader and leader.engine.running:
            try:
                leader.engine.wake("kv_cache")
            except EngineFailure as failure:
                leader.record_failure(failure)
        facts["bytes"] = float(engines.weight_sync.bytes)
        engines.awake = True


def _check_weights(run: Run, engines: Engines, engine: Engine | None, facts: dict[str, float]) -> None:
    """Compare the engines' weights with the learner's where `engine.check_weights` asks for it. Collective.

    Raises WeightMismatch on every rank. An engine that fails here samples nothing until the next sync.
    """
    mode, leader = run.recipe.engine.check_weights, engines.leader
    due = leader is not None and engine is not None and (mode == "every" or not leader.checked)
    if mode == "never" or not any(run.world.any_rank(due)):
        return
    try:
        compared = compare_weights(engines.weight_sync, engine if due else None)
    except EngineFailure as failure:
        assert leader
        leader.record_failure(failure)
        return
    if leader and due and not leader.checked:
        leader.checked = True
        if reason := uncheckable_reason(engines.weight_sync):
            run.display.say(f"The engine's weights are not compared with the learner's: {reason}.")
    facts["checked"] = float(compared)


def _wake_weights(leader: EngineLeader) -> Engine | None:
    """Allocate the engine's weights, restarting a failed engine; returns None if it does not start."""
    try:
        leader.engine.wake("weights")
        leader.engine.wait_ready()
    except EngineFailure as failure:
        leader.record_failure(failure)
        return None
    return leader.engine


def shared_queue(world: World, groups: Sequence[int]) -> PromptQueue:
    """Returns one queue of the main rank's `groups` for all engines; other ranks' `groups` are ignored. Collective."""
    # Counters of the rendezvous store hand out the prompts, so a fast engine takes more than a slow one.
    name, missing = world.broadcast((uuid4().hex, groups))
    if world.ranks.world == 1:
        return PromptQueue(missing)
    return PromptQueue(missing, world.engines, lambda counter, amount: world.count(f"queue/{name}/{counter}", amount))


def sample_groups(
    leader: EngineLeader, queue: PromptQueue, take: PromptSource, n: int, how: Sampling, stop: StopRequest
) -> Iterator[SampledGroup]:
    """Yields the groups that this rank's engine takes from the queue, as they are finished.

    Ends early when the engine fails or the run is asked to `stop`, and drops requests in flight.
    """
    if leader.engine.running and not stop.poll():
        try:
            with closing(leader.engine.generate_from(take, n, how)) as groups:
                for group in groups:
                    yield group
                    if stop.poll():
                        break
        except EngineFailure as failure:
            leader.record_failure(failure)
    if stop.requested:
        queue.close()


def report_failures(run: Run, leader: EngineLeader | None) -> None:
    """Report engines that failed since the last call; the next sync restarts them. Collective.

    Raises EngineFailure on every rank after MOST_FAILURES failures of one engine in a row.
    """
    failure = None
    if leader and leader.failure:
        failure, leader.failure = (str(leader.failure), leader.failures_in_a_row), None
    for rank, report in enumerate(run.world.gather(failure)):
        if report is None:
            continue
        message, failures_in_a_row = report
        text = f"rank {rank}: {message}" if run.world.ranks.world > 1 else message
        if failures_in_a_row >= MOST_FAILURES:
            raise EngineFailure(text)
        run.log.event("engine_failure", text.splitlines()[0])
        run.display.say(f"{text}\nThe engine is restarted for what is missing.")


def show_totals(bar: Bar, queue: PromptQueue, is_main: bool) -> None:
    """Advance the main rank's bar to the groups and tokens that all engines have finished."""
    if is_main:
        groups, tokens = queue.totals()
        bar.advance(groups - bar.done, tokens - bar.tokens)
