"""Weight sync: learner -> bridge -> engine, and the hand-over of the devices around it."""

from __future__ import annotations

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.learner.offload import offload, reload
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.generator import Generator, sleep_engine
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.weights.check import check, unchecked
from mugrpo_megatron.weights.sync import sync


def sync_weights(run: Run, cursor: Cursor) -> None:
    """Give the engines the learner's weights, and then the devices: learner and engine never hold one whole together.

    The learner's optimizer state leaves first, the engine's weights wake and are synced, the learner's weights leave,
    and only then does the engine take back its KV cache. An engine that fails here is out until the next sync.
    """
    with run.phase("sync", cursor) as facts:
        reload(run.learner)  # an engine that failed is synced again
        offload(run.learner, "optimizer")
        run.world.barrier()  # an engine takes the devices of several ranks
        engine = _wake_weights(run.generator) if run.generator else None
        run.world.barrier()  # no collective waits while an engine starts anew
        try:
            sync(run.bridge, engine, version=cursor.updates)
        except EngineFailure as failure:
            assert run.generator
            run.generator.failed(failure)
            engine = None
        _check_weights(run, engine, facts)
        offload(run.learner, "weights")
        run.world.barrier()
        if run.generator and run.generator.engine.running:
            _wake_kv_cache(run.generator)
        facts["bytes"] = float(run.bridge.plan.bytes)


def _check_weights(run: Run, engine: Engine | None, facts: dict[str, float]) -> None:
    """Compare the engines' weights with the learner's where `engine.check_weights` asks for it. Collective.

    WeightMismatch on every rank ends the run; an engine that fails here is out until the next sync.
    """
    mode, generator = run.recipe.engine.check_weights, run.generator
    due = generator is not None and engine is not None and (mode == "every" or not generator.checked)
    if mode == "never" or not any(run.world.any_rank(due)):
        return
    try:
        compared = check(run.bridge, engine if due else None)
    except EngineFailure as failure:
        assert generator
        generator.failed(failure)
        return
    if generator and due and not generator.checked:
        generator.checked = True
        if reason := unchecked(run.bridge):
            run.display.say(f"The engine's weights are not compared with the learner's: {reason}.")
    facts["checked"] = float(compared)


def _wake_weights(generator: Generator) -> Engine | None:
    """The engine with its weights' memory back, started anew where it had failed; None when it does not come up."""
    try:
        generator.engine.wake("weights")
        generator.engine.wait_ready()
    except EngineFailure as failure:
        generator.failed(failure)
        return None
    return generator.engine


def _wake_kv_cache(generator: Generator) -> None:
    try:
        generator.engine.wake("kv_cache")
    except EngineFailure as failure:
        generator.failed(failure)


def sleep_engines(run: Run) -> None:
    """Give the devices back to the learner; every rank waits for the engines to have left them."""
    if run.generator:
        sleep_engine(run.generator)
    run.world.barrier()
    reload(run.learner)
