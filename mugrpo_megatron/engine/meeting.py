"""Rendezvous of an engine's processes on several nodes, and the messages between them afterwards.

SGLang's ranks meet at an address of the leader's node. The learner's ranks agree on it (`run.leader`), and the
rendezvous store carries the news that one of the processes has ended, so that the others do not wait for it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from uuid import uuid4

LOOK_EVERY_S = 1.0
"""How often a process that waits looks whether one on another node has ended."""
PORTS = 8
"""SGLang derives further ports from the one that it is given, when attention is data parallel: those that follow."""


def nothing_told() -> str:
    """The news of an engine on one node."""
    return ""


def tell_none(cause: str) -> None:
    """An engine on one node has no other node to tell."""


@dataclass
class Bond:
    """The news among the processes of one start: why the first of them ended. Any thread may use it."""

    address: str = ""
    """Where SGLang's ranks meet: HOST:PORT on the leader's node."""
    tell: Callable[[str], None] = tell_none
    """Tell the other nodes that the process of this one has ended, and why."""
    told: Callable[[], str] = nothing_told
    """What was told; empty while nothing was."""
    _known: str = ""
    _next: float = 0.0
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def broken(self, now: bool = False) -> str:
        """Why a process of the engine has ended, empty while none has; looks once a second, or `now`."""
        with self._looking:
            if not self._known and (now or time.monotonic() >= self._next):
                self._next = time.monotonic() + LOOK_EVERY_S
                self._known = self.told()
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
class Part:
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


def part_of(engine: int, node: int, running: bool) -> Part:
    """What this rank says, from torchrun's variables."""
    name, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    family, kind, _, _, place = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing; the kernel chooses the way and with it the address
        here = probe.getsockname()[0]
    return Part(engine, node, running, here, str(place[0]), free_port(), uuid4().hex)


def address_of(parts: list[Part]) -> str:
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
