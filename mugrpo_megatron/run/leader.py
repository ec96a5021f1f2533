"""What a rank has of the engines: the one that it leads with its verifier, or a part of one that another rank leads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.data.prepare import PreparedData
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.nodes import Bond, JoinedEngine, address_of, part_of
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.errors import EngineFailure, EngineStopped
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.world import World
from mugrpo_megatron.weights.sync import Bridge


@dataclass
class EngineLeader:
    """An engine leader's engine, verifier and problems, with a count of the engine's failures."""

    slot: EngineSlot
    engine: Engine
    verifier: Verifier
    tokenizer: PreTrainedTokenizerBase
    problems: PreparedData
    failure: EngineFailure | None = None
    """The last failure that is not reported yet."""
    failures_in_a_row: int = 0
    """Failures without a finished group between them."""
    checked: bool = False
    """Whether this engine's weights were compared with the learner's after a sync."""

    def failed(self, failure: EngineFailure) -> None:
        """Record a failure, unless the engine was ended because the run stops."""
        self.checked = False
        if not isinstance(failure, EngineStopped):
            self.failure = failure
            self.failures_in_a_row += 1


def start(
    recipe: Recipe,
    logs: Path,
    slot: EngineSlot,
    stack: ExitStack,
    stopping: Callable[[], bool],
    warm_host: HostProcess | None = None,
) -> tuple[EngineSlot, Engine, Verifier]:
    """Launch the slot's engine, which loads while this returns, and a verifier with its share of the node's cores.

    `stack` ends them. The engine takes the process `warm_host` if it can. Once `stopping()` is True, no call waits for
    the engine. One of several nodes is not launched yet: `meet` does.
    """
    name = f"engine-{slot.number:04d}.log" if slot.number else "engine.log"
    make = Engine if recipe.engine.nodes > 1 else Engine.start
    engine = make(recipe, recipe.model.directory, logs / name, slot, stopping, warm_host)
    stack.callback(engine.stop)
    workers = recipe.reward.workers or max(1, usable_cores() // 2 // slot.local_engines)
    verifier = stack.enter_context(Verifier(recipe.reward.model_copy(update={"workers": workers})))
    return slot, engine, verifier


@dataclass
class Engines:
    """What a rank needs to sync all engines and to run its own."""

    bridge: Bridge
    """Carries the learner's weights to the engines."""
    leader: EngineLeader | None
    """None on a rank that leads no engine."""
    joined: JoinedEngine | None = None
    """What this rank runs of an engine that a rank of another node leads."""
    awake: bool = False
    """Whether the engines have the learner's weights and the devices; the same on every rank."""

    @property
    def own(self) -> Engine | JoinedEngine | None:
        """What this rank runs of an engine."""
        return self.leader.engine if self.leader else self.joined

    @property
    def writer(self) -> int:
        """This rank's writer number in a stage store: its engine's number."""
        return self.leader.slot.number if self.leader else 0


def meet(world: World, own: Engine | JoinedEngine | None) -> str:
    """Start all processes of every engine of which one does not run. Collective; `own` is what this rank runs of one.

    Returns at once, and on the leader of a running engine what had ended of it.
    """
    gathered = world.gather(None if own is None else part_of(own.slot.number, own.slot.node, own.running))
    if own is None:
        return ""
    parts = [part for part in gathered if part is not None and part.engine == own.slot.number]
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
