"""Engines of several nodes: their processes start together after a barrier of all ranks, and after each failure."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.joined import JoinedEngine
from mugrpo_megatron.engine.meeting import Bond, address_of, part_of
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.world import World


def meet(world: World, own: Engine | JoinedEngine | None) -> str:
    """Start all processes of every engine of which one does not run. Collective; `own` is what this rank runs of one.

    Returns at once, and on the leader of a running engine what had ended of it.
    """
    said = world.gather(None if own is None else part_of(own.slot.number, own.slot.node, own.running))
    if own is None:
        return ""
    parts = [part for part in said if part is not None and part.engine == own.slot.number]
    if all(part.running for part in parts):
        return ""
    (leader,) = [part for part in parts if part.node == 0]
    name = f"engine/{leader.name}"
    ended = [str(part.node) for part in parts if part.node and not part.running]
    own.meet(Bond(address_of(parts), partial(world.tell, name), partial(world.told, name)))
    return f"the engine's processes on its nodes {', '.join(ended)} have ended" if leader.running else ""


def sleep_joined(world: World, joined: JoinedEngine | None, nodes: int) -> None:
    """End what runs of an engine on another node than its leader's, where that was stopped or failed. Collective.

    Called by every rank once its engine sleeps; afterwards no engine holds memory of any rank's device.
    """
    world.barrier()
    if nodes > 1:
        if joined:
            joined.sleep()
        world.barrier()


def join(recipe: Recipe, logs: Path, slot: EngineSlot, stack: ExitStack) -> JoinedEngine | None:
    """What this rank runs of an engine that a rank of another node leads, not started yet; `stack` ends it."""
    if not slot.joins:
        return None
    log = logs / f"engine-{slot.number:04d}-node-{slot.node}.log"
    joined = JoinedEngine(recipe, recipe.model.directory, log, slot)
    stack.callback(joined.stop)
    return joined
