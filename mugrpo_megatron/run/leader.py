"""What a rank has of the engines: the one that it leads with its verifier, or a part of one that another rank leads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.data.prepare import PreparedData
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.nodes import EngineFollowerNode, PeerFailure, leader_address, node_status
from mugrpo_megatron.engine.placement import EngineSlot, slot_of_environment
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.errors import EngineFailure, EngineStopped
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.world import World
from mugrpo_megatron.weights.sync import WeightSync


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

    def record_failure(self, failure: EngineFailure) -> None:
        """Record a failure, unless the engine was ended because the run stops."""
        self.checked = False
        if not isinstance(failure, EngineStopped):
            self.failure = failure
            self.failures_in_a_row += 1


@dataclass
class EngineRole:
    """This rank's place among the engines, and what it leads of them once that is started."""

    recipe: Recipe
    logs: Path
    slot: EngineSlot
    stopping: Callable[[], bool]
    """Once it is True, no call waits for the engine."""
    launched: bool = False
    started: tuple[Engine, Verifier] | None = None

    @property
    def starts_after_offload(self) -> bool:
        """Whether the engine starts only once the learner is offloaded, and the ranks of all its nodes have met."""
        return finds_cuda() or self.recipe.engine.nodes > 1

    def start(self, stack: ExitStack, host: HostProcess | None = None) -> None:
        """Launch the engine, if this rank leads one, and a verifier with its share of the node's cores.

        The engine loads while this returns, and takes the process `host` if it can; `stack` ends both. One of
        several nodes is not launched yet: `rendezvous` does.
        """
        self.launched = True
        if not self.slot.leads_engine:
            return
        recipe, number = self.recipe, self.slot.number
        log = self.logs / (f"engine-{number:04d}.log" if number else "engine.log")
        make = Engine if recipe.engine.nodes > 1 else Engine.start
        engine = make(engine_spec(recipe), recipe.model.directory, log, self.slot, self.stopping, host)
        stack.callback(engine.stop)
        workers = recipe.reward.workers or max(1, usable_cores() // 2 // self.slot.local_engines)
        verifier = stack.enter_context(Verifier(recipe.reward.model_copy(update={"workers": workers})))
        self.started = engine, verifier

    def follow(self, stack: ExitStack) -> EngineFollowerNode | None:
        """What this rank runs of an engine that a rank of another node leads, not started yet; `stack` ends it."""
        if not self.slot.joins:
            return None
        log = self.logs / f"engine-{self.slot.number:04d}-node-{self.slot.node}.log"
        joined = EngineFollowerNode(engine_spec(self.recipe), self.recipe.model.directory, log, self.slot)
        stack.callback(joined.stop)
        return joined


def role_of(recipe: Recipe, logs: Path, stopping: Callable[[], bool]) -> EngineRole:
    """The role that torchrun's variables give this rank."""
    return EngineRole(recipe, logs, slot_of_environment(recipe.engine, finds_cuda()), stopping)


@dataclass
class Engines:
    """What a rank needs to sync all engines and to run its own."""

    weight_sync: WeightSync
    """Carries the learner's weights to the engines."""
    leader: EngineLeader | None
    """None on a rank that leads no engine."""
    follower: EngineFollowerNode | None = None
    """What this rank runs of an engine that a rank of another node leads."""
    nodes: int = 1
    """Of each engine."""
    awake: bool = False
    """Whether the engines have the learner's weights and the devices; the same on every rank."""

    @property
    def local(self) -> Engine | EngineFollowerNode | None:
        """What this rank runs of an engine."""
        return self.leader.engine if self.leader else self.follower

    @property
    def writer(self) -> int:
        """This rank's writer number in a stage store: its engine's number."""
        return self.leader.slot.number if self.leader else 0


def rendezvous(world: World, own: Engine | EngineFollowerNode | None) -> str:
    """Start all processes of every engine of which one does not run. Collective; `own` is what this rank runs of one.

    Returns at once, and on the leader of a running engine what had ended of it.
    """
    gathered = world.gather(None if own is None else node_status(own.slot.number, own.slot.node, own.running))
    if own is None:
        return ""
    parts = [part for part in gathered if part is not None and part.engine == own.slot.number]
    if all(part.running for part in parts):
        return ""
    (leader,) = [part for part in parts if part.node == 0]
    name = f"engine/{leader.name}"
    ended = [str(part.node) for part in parts if part.node and not part.running]
    own.rendezvous(PeerFailure(leader_address(parts), partial(world.store_set, name), partial(world.store_get, name)))
    return f"the engine's processes on its nodes {', '.join(ended)} have ended" if leader.running else ""


def sleep_followers(world: World, engines: Engines) -> None:
    """End what runs of an engine on another node than its leader's, where that was stopped or failed. Collective.

    Called by every rank once its engine sleeps; afterwards no engine holds memory of any rank's device.
    """
    world.barrier()
    if engines.nodes > 1:
        if engines.follower:
            engines.follower.sleep()
        world.barrier()
