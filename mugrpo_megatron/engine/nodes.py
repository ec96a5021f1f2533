"""An engine over several nodes: rendezvous of its processes, and the host process on a follower node.

SGLang's ranks meet at an address of the leader's node, on which the learner's ranks agree (`run.engines`). SGLang's
rank 0 broadcasts every request to the ranks of all nodes, also those about weights and memory. So the process on a
follower node receives no commands: it is started with the leader's, watched, and ended with it.
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
from mugrpo_megatron.engine.launch import EngineSpec, engine_arguments, engine_environment
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.engine.process import DEATH_SECONDS, STARTING, HostProcess
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, EngineStopped
from mugrpo_megatron.observe.environment import rank_of_environment

POLL_S = 1.0
"""Seconds after which a waiting process asks again whether another node has failed."""
PORTS = 8
"""Number of consecutive free ports that a start needs. With data parallel attention SGLang uses several."""


@dataclass
class PeerFailure:
    """Shares the first failure of an engine's processes with all of the engine's nodes. Thread-safe.

    Each start of the engine has an object of its own.
    """

    address: str = ""
    """HOST:PORT on the leader's node, at which SGLang's ranks meet."""
    publish: Callable[[str], None] = lambda cause: None
    """Tells the other nodes that this node's process has ended, and why."""
    fetch: Callable[[], str] = lambda: ""
    """Returns the failure that a node has published; empty if none has."""
    _cause: str = ""
    _next_poll: float = 0.0
    _polling: threading.Lock = field(default_factory=threading.Lock)

    def cause(self, now: bool = False) -> str:
        """The first failure that a node has published; empty if none has.

        `fetch` is called at most every `POLL_S` seconds, unless `now`, and no more once there is a failure.
        """
        with self._polling:
            if not self._cause and (now or time.monotonic() >= self._next_poll):
                self._next_poll = time.monotonic() + POLL_S
                self._cause = self.fetch()
            return self._cause

    def report(self, cause: str) -> None:
        """Publish the failure of this node's process, unless another node has published a failure."""
        if not self.cause(now=True):
            self.publish(cause)

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What each rank that runs a process of an engine reports before the engine starts, to agree on an address."""

    engine: int
    node: int
    """Index of the rank's node among the engine's nodes; the leader is on node 0."""
    running: bool
    address: str
    """This node's address on the network that leads to the node of rank 0."""
    rank0_address: str
    """The address of rank 0's node, as this node resolves it."""
    port: int
    """A free port of this node."""
    name: str
    """A unique name for the engine's next start; only the one from the leader's node is used."""


def node_status(engine: int, node: int, running: bool) -> NodeStatus:
    """This rank's status, with addresses that follow from torchrun's environment variables."""
    name, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    family, kind, _, _, target = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # UDP sends nothing here; the kernel picks the route and with it the local address
        address = probe.getsockname()[0]
    return NodeStatus(engine, node, running, address, str(target[0]), free_port(), uuid4().hex)


def leader_address(statuses: list[NodeStatus]) -> str:
    """HOST:PORT at which the other nodes of an engine reach its leader; `statuses` has one entry for each node."""
    leader, *others = sorted(statuses, key=lambda status: status.node)
    # Engine 0 is led by rank 0, whose name may resolve to loopback on its own node, so the address that another node
    # sees is taken.
    host = others[0].rank0_address if leader.engine == 0 and others else leader.address
    return f"[{host}]:{leader.port}" if ":" in host else f"{host}:{leader.port}"


def free_port() -> int:
    """A port of this machine that is free, as are the next PORTS - 1."""
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
"""The longest that the watching thread may take to end the process."""


class FollowerNode:
    """The host process on a follower node (one that does not lead its engine), and the thread that watches it.

    The thread reports a failure of the process to the other nodes, and ends the process when another node has failed.
    Either way the leader's call raises EngineFailure, and the next `rendezvous` restarts the processes of all nodes.
    """

    def __init__(self, spec: EngineSpec, model_dir: Path, log: Path, slot: EngineSlot) -> None:
        """Prepare the process, with its output in `log`.

        Raises UserError if SGLang is not installed, and as `engine_arguments` does if `model_dir` is not a checkpoint,
        if its positions are too few for the lengths of `spec`, or if a field of its config is missing.
        """
        self._section, self._cuda, self.slot, self.log = spec.section, finds_cuda(), slot, log
        self._arguments = engine_arguments(spec, model_dir, self._cuda, slot)
        self._environment = engine_environment(spec.section, model_dir, self._cuda, slot)
        self._peers = PeerFailure()
        self._host: HostProcess | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def rendezvous(self, peers: PeerFailure) -> None:
        """End the process if there is one, start a new one, and return at once.

        Its SGLang ranks meet those of the leader at `peers.address`.
        """
        self.stop()
        self._peers, self._stopping = peers, threading.Event()
        # The process is started here and not in the watching thread: the kernel kills a process when the thread that
        # created it ends.
        host = HostProcess(self._environment, self._cuda, single_node=False)
        host.load([self._arguments | {"dist_init_addr": peers.address}], self.log, self._stopping.is_set, peers.cause)
        self._host = host
        self._thread = threading.Thread(target=self._watch, args=(host, peers), name="engine follower", daemon=True)
        self._thread.start()

    def sleep(self) -> None:
        """Do this node's part of the engine's `sleep`.

        The process is ended if `engine.between_stages` is `restart`, or if the process of another node has failed.
        """
        if self._section.between_stages == "restart" or self._peers.cause(now=True):
            self.stop()

    def stop(self) -> None:
        """End the process; returns once it is gone."""
        if self._thread is not None and self._host is not None:
            self._stopping.set()
            self._thread.join(WATCH_SECONDS)  # the thread ends the process, unless it hangs in a lost rendezvous
            self._host.end()
            self._host, self._thread = None, None

    def _watch(self, host: HostProcess, peers: PeerFailure) -> None:
        try:
            host.receive(self._section.start_timeout_s, STARTING)
            host.receive(math.inf, "service")  # waits for ever, and raises when the host process ends
        except EngineStopped:
            return
        except CollectiveFailure:  # another rank has failed, so the whole run is ending
            host.end()
            return
        except EngineFailure as failure:
            with suppress(CollectiveFailure):
                peers.report(f"on its node {self.slot.node}, that of rank {rank_of_environment()}: {failure}")
