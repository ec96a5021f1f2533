"""An engine over several nodes: the rendezvous of its processes, and its part on a node other than its leader's.

SGLang's ranks meet at an address of the leader's node. The learner's ranks agree on it (`run.leader`), and the
rendezvous store carries the news that one of the processes has ended, so that the others do not wait for it. SGLang's
rank 0 hands every request, of weights and of memory too, to the ranks of all nodes: the part of another node gets no
commands, it is started with the leader's, watched, and ended with it.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.engine.launch import engine_arguments, engine_environment
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.engine.process import DEATH_SECONDS, STARTING, HostProcess, no_peer_failure
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, EngineStopped
from mugrpo_megatron.observe.environment import rank_of_environment
from mugrpo_megatron.recipe import Recipe

LOOK_EVERY_S = 1.0
"""How often a process that waits looks whether one on another node has ended."""
PORTS = 8
"""SGLang derives further ports from its first one, when attention is data parallel: those that follow."""


def ignore_failure(cause: str) -> None:
    """An engine on one node has no other node to tell."""


@dataclass
class PeerFailure:
    """The news among the processes of one start: why the first of them ended. Any thread may use it."""

    address: str = ""
    """Where SGLang's ranks meet: HOST:PORT on the leader's node."""
    tell: Callable[[str], None] = ignore_failure
    """Tell the other nodes that the process of this one has ended, and why."""
    news: Callable[[], str] = no_peer_failure
    """What another node told; empty while none did."""
    _known: str = ""
    _next: float = 0.0
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def broken(self, now: bool = False) -> str:
        """Why a process of the engine has ended, empty while none has; looks once a second, or `now`."""
        with self._looking:
            if not self._known and (now or time.monotonic() >= self._next):
                self._next = time.monotonic() + LOOK_EVERY_S
                self._known = self.news()
            return self._known

    def ended(self, cause: str) -> None:
        """Tell the other nodes of the first process that ends, which is this one unless they have told already."""
        if not self.broken(now=True):
            self.tell(cause)

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What a rank says of the part of an engine that it runs."""

    engine: int
    node: int
    """Index of its node among the engine's; the leader is on the first."""
    running: bool
    here: str
    """Address of this node as it reaches the node of rank 0."""
    first: str
    """Address of rank 0's node as this one reaches it."""
    port: int
    """A free port of this node."""
    name: str
    """Of the next start, if this part leads the engine: no other start has it."""


def node_status(engine: int, node: int, running: bool) -> NodeStatus:
    """What this rank says, from torchrun's variables."""
    name, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    family, kind, _, _, place = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing; the kernel chooses the way and with it the address
        here = probe.getsockname()[0]
    return NodeStatus(engine, node, running, here, str(place[0]), free_port(), uuid4().hex)


def leader_address(parts: list[NodeStatus]) -> str:
    """HOST:PORT at which the leader's node is reached from the engine's other nodes; `parts` are those of one engine.

    The first engine is led by rank 0, whose own name may mean loopback there; the other nodes know its address.
    """
    leader, *others = sorted(parts, key=lambda part: part.node)
    host = others[0].first if leader.engine == 0 and others else leader.here
    return f"[{host}]:{leader.port}" if ":" in host else f"{host}:{leader.port}"


def free_port() -> int:
    """A port of this machine that nothing listens on, nor on the `PORTS` that follow it."""
    while True:
        with ExitStack() as stack:
            port = 0
            try:
                for shift in range(PORTS):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("", port + shift if port else 0))
                    port = port or probe.getsockname()[1]
            except (OSError, OverflowError):
                continue
            return port


WATCH_SECONDS = DEATH_SECONDS + 2.0
"""The watching thread ends the process within this time."""


class EngineFollowerNode:
    """The host process of one of an engine's other nodes, and the thread that watches it.

    When the process ends, the thread tells the leader why; when the leader's process or that of a third node has ended,
    it ends this one. Either way the engine's leader reports the failure, and the next `meet` starts all parts again.
    """

    def __init__(self, recipe: Recipe, model_dir: Path, log: Path, slot: EngineSlot) -> None:
        """Prepare it, with its output in `log`; UserError when the recipe cannot be served."""
        self._section, self._cuda, self.slot, self.log = recipe.engine, finds_cuda(), slot, log
        self._arguments = engine_arguments(recipe, model_dir, self._cuda, slot)
        self._environment = engine_environment(recipe, model_dir, self._cuda, slot)
        self._bond = PeerFailure()
        self._host: HostProcess | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def running(self) -> bool:
        """Whether there is a process that nothing has ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def rendezvous(self, bond: PeerFailure) -> None:
        """End the process if there is one, and start one that meets the leader's; returns at once."""
        self.stop()
        self._bond, self._stopping = bond, threading.Event()
        # Made in this thread: the kernel ends it with the thread that made it.
        host = HostProcess(self._environment, self._cuda, alone=False)
        host.load([self._arguments | {"dist_init_addr": bond.address}], self.log, self._stopping.is_set, bond.broken)
        self._host = host
        self._thread = threading.Thread(target=self._watch, args=(host, bond), name="joined engine", daemon=True)
        self._thread.start()

    def sleep(self) -> None:
        """After the leader's engine was put to sleep: end the process where the leader's has ended, for any reason."""
        if self._section.between_stages == "restart" or self._bond.broken(now=True):
            self.stop()

    def stop(self) -> None:
        """End the process; returns when it has gone."""
        if self._thread is not None and self._host is not None:
            self._stopping.set()
            self._thread.join(WATCH_SECONDS)  # which ends it, unless it waits for a rendezvous that is gone
            self._host.end()
            self._host, self._thread = None, None

    def _watch(self, host: HostProcess, bond: PeerFailure) -> None:
        try:
            host.receive(self._section.start_timeout_s, STARTING)
            host.receive(math.inf, "service")  # nothing comes but its end
        except EngineStopped:
            return
        except CollectiveFailure:  # the run ends, and its other ranks with it
            host.end()
            return
        except EngineFailure as failure:
            with suppress(CollectiveFailure):
                bond.ended(f"on its node {self.slot.node}, that of rank {rank_of_environment()}: {failure}")
