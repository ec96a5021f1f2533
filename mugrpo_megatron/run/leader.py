"""This rank's engine with its verifier, or its node of an engine that another rank leads."""

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
    """The engine that this rank leads, with its verifier, its problems and its failures."""

    slot: EngineSlot
    engine: Engine
    verifier: Verifier
    tokenizer: PreTrainedTokenizerBase
    problems: PreparedData
    failure: EngineFailure | None = None
    """The last failure, until it is reported."""
    failures_in_a_row: int = 0
    """Failures since the last finished group."""
    checked: bool = False
    """Whether the weights of this engine were compared with the learner's since its start."""

    def record_failure(self, failure: EngineFailure) -> None:
        """Record a failure, unless the engine was ended because the run stops."""
        self.checked = False
        if not isinstance(failure, EngineStopped):
            self.failure = failure
            self.failures_in_a_row += 1


@dataclass
class EngineRole:
    """This rank's slot among the engines, and the engine that it leads once that is started."""

    recipe: Recipe
    logs: Path
    slot: EngineSlot
    stopping: Callable[[], bool]
    """Whether the run stops: then no call waits for the engine."""
    launched: bool = False
    started: tuple[Engine, Verifier] | None = None

    @property
    def starts_after_offload(self) -> bool:
        """Whether the engine starts only after the learner's offload and the rendezvous of its nodes."""
        # A GPU may not hold both at once, and the nodes of one engine must start together.
        return finds_cuda() or self.recipe.engine.nodes > 1

    def start(self, stack: ExitStack, host: HostProcess | None = None) -> None:
        """Launch the engine, if this rank leads one, and a verifier with its share of the node's cores.

        Returns while the engine loads, in the process `host` if it can; `stack` ends both. An engine over several nodes
        is launched by `rendezvous`.
        """
        self.launched = True
        if not self.slot.leads_engine:
            return
        recipe, number = self.recipe, self.slot.number
        log = self.logs / (f"engine-{number:04d}.log" if number else "engine.log")
        start = Engine if recipe.engine.nodes > 1 else Engine.start
        engine = start(engine_spec(recipe), recipe.model.directory, log, self.slot, self.stopping, host)
        stack.callback(engine.stop)
        # Half of the cores: the engine's scheduler and tokenizer need the others while the verifier scores.
        workers = recipe.reward.workers or max(1, usable_cores() // 2 // self.slot.local_engines)
        verifier = stack.enter_context(Verifier(recipe.reward.model_copy(update={"workers": workers})))
        self.started = engine, verifier

    def follow(self, stack: ExitStack) -> EngineFollowerNode | None:
        """This rank's node of an engine that another node leads, not started yet; `stack` ends it."""
        if not self.slot.joins:
            return None
        log = self.logs / f"engine-{self.slot.number:04d}-node-{self.slot.node}.log"
        follower = EngineFollowerNode(engine_spec(self.recipe), self.recipe.model.directory, log, self.slot)
        stack.callback(follower.stop)
        return follower


def engine_role(recipe: Recipe, logs: Path, stopping: Callable[[], bool]) -> EngineRole:
    """The role of this rank, by torchrun's environment variables."""
    return EngineRole(recipe, logs, slot_of_environment(recipe.engine, finds_cuda()), stopping)


@dataclass
class Engines:
    """All engines as this rank sees them: the sync to all, and the node of an engine that it runs."""

    weight_sync: WeightSync
    """Carries the learner's weights to the engines."""
    leader: EngineLeader | None
    """None on a rank that leads no engine."""
    follower: EngineFollowerNode | None = None
    """This rank's node of an engine that another node leads."""
    nodes: int = 1
    """Nodes of each engine."""
    awake: bool = False
    """Whether the engines have the learner's weights and the devices; the same on every rank."""

    @property
    def local(self) -> Engine | EngineFollowerNode | None:
        """This rank's engine, or its node of one."""
        return self.leader.engine if self.leader else self.follower

    @property
    def writer(self) -> int:
        """This rank's writer number in a stage store: its engine's number."""
        return self.leader.slot.number if self.leader else 0


def rendezvous(world: World, local: Engine | EngineFollowerNode | None) -> str:
    """Restart every engine that lost a process; returns at once. Collective; `local` is this rank's node of an engine.

    On the leader of a running engine the result says which of its processes had ended, else it is empty.
    """
    statuses = world.gather(None if local is None else node_status(local.slot.number, local.slot.node, local.running))
    if local is None:
        return ""
    # SGLang's nodes rendezvous once, at their start (--dist-init-addr): a node cannot join again, so all restart.
    nodes = [status for status in statuses if status is not None and status.engine == local.slot.number]
    if all(node.running for node in nodes):
        return ""
    (leader,) = [node for node in nodes if node.node == 0]
    name = f"engine/{leader.name}"
    ended = [str(node.node) for node in nodes if node.node and not node.running]
    local.rendezvous(PeerFailure(leader_address(nodes), partial(world.store_set, name), partial(world.store_get, name)))
    return f"the engine's processes on its nodes {', '.join(ended)} have ended" if leader.running else ""


def sleep_engines(world: World, engines: Engines) -> None:
    """Put the engines to sleep, and end their follower nodes; the learner stays offloaded. Collective.

    Afterwards no engine holds memory of any rank's device. One that fails here is reported and restarted later: it
    happens on a GPU that other processes keep busy, since SGLang unmaps the weights without waiting for the copies of
    their buffers (`release_memory_occupation`, managers/scheduler_components/weight_updater.py).
    """
    engines.awake = False
    if leader := engines.leader:
        try:
            leader.engine.sleep()
        except EngineFailure as failure:  # the process was ended, which frees the devices as well
            leader.record_failure(failure)
    world.barrier()
    if engines.nodes > 1:
        if engines.follower:
            engines.follower.sleep()
        world.barrier()
