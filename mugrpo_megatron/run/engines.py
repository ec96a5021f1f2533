"""The engines of a run as one rank sees them: their start, their turn on the devices, their sleep.

    launch ............ starts the engine's process, which loads `model.path`; on CPU while the learner is built
    start_engines ..... waits until every engine has loaded; each then sleeps until its first turn
    wake("weights") ... allocates memory for weights, and restarts an engine that has failed
    receive ........... loads the learner's weights, bucket by bucket
    wake("kv_cache") .. allocates memory for sampling, once the learner is offloaded
    sleep ............. frees the devices for the learner

A *leader* is a rank that talks to an engine. An engine that fails takes no further part in its turn, and is started
again for the next one.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.data.prepare import PreparedData
from mugrpo_megatron.engine.client import Engine, MemoryTag
from mugrpo_megatron.engine.nodes import FollowerNode, PeerFailure, leader_address, node_status
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import EngineSection
from mugrpo_megatron.run.leader import Launched, Leader, make_leader, wait_for_engines
from mugrpo_megatron.run.world import World
from mugrpo_megatron.weights.check import compare_weights, uncheckable_reason
from mugrpo_megatron.weights.sync import WeightSync, sync


@dataclass
class Engines:
    """All engines as this rank sees them. Every method is collective."""

    world: World
    section: EngineSection
    weight_sync: WeightSync
    """How the learner's weights are sent to the engines (`weights.sync`)."""
    leader: Leader | None = None
    """The engine that this rank leads; None on a rank that leads none."""
    follower: FollowerNode | None = None
    """This rank's process of an engine over several nodes that a rank of another node leads; None on other ranks."""
    agreed: bool = False
    """Whether all engines have been found to agree with the learner since the start (`phases.agreement`); the same on
    every rank."""
    awake: bool = False
    """Whether it is the engines' turn: they have all their memory and the learner's weights. The same on every rank."""

    @property
    def local(self) -> Engine | FollowerNode | None:
        """The engine that this rank leads, or its process of an engine that another rank leads."""
        return self.leader.engine if self.leader else self.follower

    @property
    def writer(self) -> int:
        """The number under which this rank writes to a stage: the number of the engine that it leads, else 0."""
        return self.leader.slot.number if self.leader else 0

    def wake(self, memory: MemoryTag) -> None:
        """Allocate the engines' memory of the kind `memory`, once every rank has called this.

        The caller has offloaded the part of the learner that is in the way.

        With `weights`, engines that have failed are started again, and have loaded when this returns.
        """
        # All ranks wait for each other, because an engine may span the devices of several. They wait in a barrier
        # without a timeout, since a collective would time out while an engine restarts.
        self.world.barrier()
        if memory == "weights":
            self.rendezvous()
        if (leader := self.leader) and (leader.engine.running or memory == "weights"):
            with leader.guarded():
                leader.engine.wake(memory)
                leader.engine.wait_ready()
        self.awake = memory == "kv_cache"

    def receive(self, version: int) -> dict[str, float]:
        """Load the learner's weights into the engines as weights of `version`, and compare them as the recipe asks.

        Returns the metrics `bytes` and, after a comparison (`engine.check_weights`), `checked`, the number of compared
        tensors. Raises WeightMismatch on every rank when the compared weights differ.
        """
        self.world.barrier()  # without it the sync's collectives could time out while an engine still starts
        leader = self.leader
        with leader.guarded() if leader else ExitStack():
            sync(self.weight_sync, self._running, version)
        return {"bytes": float(self.weight_sync.bytes), **self.compare()}

    def compare(self) -> dict[str, float]:
        """Compare the engines' weights with the learner's, if `engine.check_weights` asks for it.

        Returns the metric `checked`, the number of compared tensors, or nothing without a comparison.
        """
        leader, check = self.leader, self.section.check_weights
        due = leader is not None and leader.engine.running and (check == "every" or not leader.checked)
        if check == "never" or not self.world.any_rank(due):
            return {}
        with leader.guarded() if leader else ExitStack():
            compared = compare_weights(self.weight_sync, self._running if due else None)
            if leader and due:
                leader.checked = True
            return {"checked": float(compared)}
        return {}

    def sleep(self) -> None:
        """Put the engines to sleep, so that no engine holds memory of any rank's device; the learner stays offloaded.

        An engine that fails here is reported and restarted later. That happens on a GPU that other processes keep busy,
        since SGLang unmaps the weights without waiting for the copies of their buffers (`release_memory_occupation`,
        managers/scheduler_components/weight_updater.py).
        """
        self.awake = False
        if leader := self.leader:
            with leader.guarded():  # if an engine fails here its process is ended, which frees its devices as well
                leader.engine.sleep()
        self.world.barrier()
        if self.section.nodes > 1:
            if self.follower:
                self.follower.sleep()
            self.world.barrier()

    def rendezvous(self) -> None:
        """If a process of an engine over several nodes does not run, start or restart that engine on all its nodes.

        It does not wait until the engine has loaded.
        """
        if self.section.nodes > 1 and (ended := rendezvous(self.world, self.local)) and self.leader:
            self.leader.note(EngineFailure(ended))

    @property
    def _running(self) -> Engine | None:
        return self.leader.engine if self.leader and self.leader.engine.running else None


def rendezvous(world: World, local: Engine | FollowerNode | None) -> str:
    """If a process of an engine over several nodes does not run, start or restart that engine on all its nodes.

    Collective; it does not wait until the engine has loaded. `local` is the engine or the follower process that this
    rank runs, or None. If the process of this engine's leader was running, and others of the engine were not, returns
    a sentence that names their nodes; else an empty text.
    """
    statuses = world.gather(None if local is None else node_status(local.slot.number, local.slot.node, local.running))
    if local is None:
        return ""
    # SGLang's nodes connect only once, at their start (--dist-init-addr). A process could not join the others later, so
    # if one does not run, those of all nodes are restarted.
    nodes = [status for status in statuses if status is not None and status.engine == local.slot.number]
    if all(node.running for node in nodes):
        return ""
    (leader,) = [node for node in nodes if node.node == 0]
    name = f"engine/{leader.name}"
    ended = [str(node.node) for node in nodes if node.node and not node.running]
    local.rendezvous(PeerFailure(leader_address(nodes), partial(world.store_set, name), partial(world.store_get, name)))
    return f"the engine's processes on its nodes {', '.join(ended)} have ended" if leader.running else ""


def start_engines(
    recipe: Recipe,
    launched: Launched,
    world: World,
    weight_sync: WeightSync,
    prepared: PreparedData | None,
    display: Display,
) -> Engines:
    """Wait until the engines that the ranks have launched have loaded, and put them to sleep. Collective.

    On CPU they stay awake if `engine.between_stages` is "restart".

    `prepared` has the problems on rank 0; the other ranks get them from there.

    Raises UserError on every rank when an engine does not start.
    """
    problems, leader = world.broadcast(prepared), None
    if launched.led and problems:
        leader = make_leader(recipe, launched.slot, *launched.led, problems)
    engines = Engines(world, recipe.engine, weight_sync, leader, launched.follower)
    engines.rendezvous()
    with display.waiting(f"waiting for the engine, see {launched.logs}"):
        wait_for_engines(leader, world)
    if recipe.engine.check_weights != "never" and (reason := uncheckable_reason(weight_sync)):
        display.say(f"The engine's weights are not compared with the learner's: {reason}.")
    # Engine and learner take turns on a GPU, and the learner's turn is first: its weights are reloaded next, and if the
    # run resumes inside a stage, it trains. So the engine releases its memory now (SGLang's release_memory_occupation)
    # and gets weights at the first sync. On CPU it stays awake if sleeping would end its process ("restart").
    if finds_cuda() or recipe.engine.between_stages == "sleep":
        engines.sleep()
    return engines
