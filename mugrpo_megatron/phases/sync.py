"""Weight sync: learner -> bridge -> engine, and the hand-over of the devices around it."""

from __future__ import annotations

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.learner.learner import Learner, offload, reload
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.leader import EngineLeader, Engines, meet, sleep_joined
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.weights.check import check, unchecked
from mugrpo_megatron.weights.sync import sync


def sync_weights(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> None:
    """Send the learner's weights to the engines, then give them the devices: a device never holds both in full.

    First the optimizer state is offloaded, the engine's weights wake and are synced, then the learner's weights are
    offloaded and the engine's KV cache wakes. An engine that fails here generates nothing until the next sync.
    """
    leader = engines.leader
    with run.phase("sync", cursor) as facts:
        reload(learner)  # where it is offloaded already: an engine that failed is synced again
        offload(learner, "optimizer")
        run.world.barrier()  # an engine spans several ranks' devices; all must have offloaded first
        if run.recipe.engine.nodes > 1 and (ended := meet(run.world, engines.own)) and leader:
            leader.failed(EngineFailure(ended))
        engine = _wake_weights(leader) if leader else None
        run.world.barrier()  # has no timeout, while a collective would time out on an engine that restarts
        try:
            sync(engines.bridge, engine, version=cursor.updates)
        except EngineFailure as failure:
            assert leader
            leader.failed(failure)
            engine = None
        _check_weights(run, engines, engine, facts)
        offload(learner, "weights")
        run.world.barrier()
        if leader and leader.engine.running:
            _wake_kv_cache(leader)
        facts["bytes"] = float(engines.bridge.bytes)
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
        compared = check(engines.bridge, engine if due else None)
    except EngineFailure as failure:
        assert leader
        leader.failed(failure)
        return
    if leader and due and not leader.checked:
        leader.checked = True
        if reason := unchecked(engines.bridge):
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


def sleep_engines(run: Run, learner: Learner, engines: Engines) -> None:
    """Put the engines to sleep, then reload the learner. Collective."""
    engines.awake = False
    if leader := engines.leader:
        try:
            leader.engine.sleep()
        except EngineFailure as failure:  # it was ended, which frees the devices as well
            leader.failed(failure)
    sleep_joined(run.world, engines.joined, run.recipe.engine.nodes)
    reload(learner)
