"""Engines over nodes: where their ranks meet, how the news of an end travels, and the part on another node."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mugrpo_megatron.engine import nodes
from mugrpo_megatron.engine.nodes import (
    PORTS,
    EngineFollowerNode,
    NodeStatus,
    PeerFailure,
    free_port,
    leader_address,
    node_status,
)
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, EngineStopped
from tests.engine.tiny import recipe


def part(engine: int, node: int, here: str, first: str = "10.0.0.1") -> NodeStatus:
    return NodeStatus(engine, node, running=True, here=here, first=first, port=7000 + node, name=f"{engine}-{node}")


def test_ranks_meet_where_all_nodes_of_the_engine_reach_its_leader() -> None:
    """On its own node the name of rank 0 may mean loopback, so its engine is where the others see it."""
    parts = [part(0, 1, "10.0.0.2"), part(0, 0, "127.0.1.1", first="127.0.1.1")]
    assert leader_address(parts) == "10.0.0.1:7000"
    assert leader_address([part(1, 0, "10.0.0.3"), part(1, 1, "10.0.0.4")]) == "10.0.0.3:7000"
    address = leader_address([part(1, 0, "fd00::3"), part(1, 1, "fd00::4")])
    assert (address, PeerFailure(address).host) == ("[fd00::3]:7000", "fd00::3")


def test_what_a_rank_says_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    one, other = node_status(3, 1, running=False), node_status(3, 1, running=False)
    assert (one.engine, one.node, one.running) == (3, 1, False)
    assert one.here == one.first
    assert one.here in ("127.0.0.1", "::1")
    assert one.name != other.name


def test_a_free_port_has_free_ones_after_it() -> None:
    first = free_port()
    for port in range(first, first + PORTS):
        with socket.socket() as probe:
            probe.bind(("", port))


def test_the_first_process_that_ends_is_the_cause_and_the_store_is_asked_once_a_second() -> None:
    board: list[str] = []
    asked: list[int] = []

    def news() -> str:
        asked.append(1)
        return board[0] if board else ""

    one, other = (PeerFailure("", board.append, news) for _ in range(2))
    assert [one.broken() for _ in range(5)] == [""] * 5
    assert len(asked) == 1
    one.ended("killed")
    other.ended("its connection was closed")
    assert board == ["killed"]
    assert one.broken(now=True) == other.broken(now=True) == "killed"


SLOT = EngineSlot(False, number=2, engines=3, local=0, local_engines=1, gpu=0, node=1, joins=True)


class Host:
    """A host process that has loaded its model; `dies` makes it die, a wait looks at what ends it."""

    made: ClassVar[list[Host]] = []

    def __init__(self, environment: dict[str, str], cuda: bool, alone: bool) -> None:
        self.environment, self.alone = environment, alone
        self.dies, self.gone = threading.Event(), False
        Host.made.append(self)

    def load(
        self, arguments: Sequence[dict[str, Any]], log: Path, cancelled: Callable[[], bool], broken: Callable[[], str]
    ) -> None:
        self.arguments, self.cancelled, self.broken = arguments, cancelled, broken

    def receive(self, timeout_s: float, doing: str) -> tuple[str, None]:
        if doing == nodes.STARTING:
            return "ready", None
        while not self.dies.wait(0.01):
            if self.cancelled():
                self.gone = True
                raise EngineStopped("asked to stop")
            if cause := self.broken():
                self.gone = True
                raise EngineFailure(cause)
        self.gone = True
        raise EngineFailure("SGLang's process ended")

    def end(self) -> None:
        self.gone = True


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineFollowerNode:
    monkeypatch.setattr(nodes, "HostProcess", Host)
    monkeypatch.setattr(Host, "made", [])
    monkeypatch.setenv("RANK", "5")
    return EngineFollowerNode(recipe(checkpoint, tensor=2, nodes=2), checkpoint, tmp_path / "engine.log", SLOT)


def board() -> tuple[list[str], PeerFailure]:
    said: list[str] = []
    return said, PeerFailure("10.0.0.1:7000", said.append, lambda: said[0] if said else "")


def ended(engine: EngineFollowerNode) -> None:
    assert engine._thread
    engine._thread.join(10)
    assert not engine.running


def test_it_is_sglang_s_second_node_at_the_leader_s_address(engine: EngineFollowerNode) -> None:
    assert not engine.running
    _, bond = board()
    engine.rendezvous(bond)
    (host,) = Host.made
    (arguments,) = host.arguments
    wanted = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:7000", "tp_size": 2}
    assert {name: arguments[name] for name in wanted} == wanted
    assert host.environment["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0"
    assert not host.alone
    assert engine.running
    engine.stop()
    assert host.gone
    assert not engine.running


@pytest.mark.parametrize("leader_first", [False, True])
def test_its_end_is_told_unless_it_ends_with_the_leader_s(leader_first: bool, engine: EngineFollowerNode) -> None:
    said, bond = board()
    engine.rendezvous(bond)
    if leader_first:
        said.append("on the node that leads it: killed")
        bond.broken(now=True)
    else:
        Host.made[0].dies.set()
    ended(engine)
    assert Host.made[0].gone
    assert said == (
        ["on the node that leads it: killed"]
        if leader_first
        else ["on its node 1, that of rank 5: SGLang's process ended"]
    )


def test_a_second_meeting_ends_the_process_of_the_first(engine: EngineFollowerNode) -> None:
    for _ in range(2):
        engine.rendezvous(board()[1])
    first, second = Host.made
    assert (first.gone, second.gone, engine.running) == (True, False, True)
    engine.stop()


@pytest.mark.parametrize("leader_is_gone", [False, True])
def test_asleep_it_is_there_as_long_as_its_leader(engine: EngineFollowerNode, leader_is_gone: bool) -> None:
    said, bond = board()
    engine.rendezvous(bond)
    said.extend(["killed"] * leader_is_gone)
    engine.sleep()
    assert engine.running is not leader_is_gone
    engine.stop()


def test_a_rendezvous_that_is_gone_ends_it(engine: EngineFollowerNode) -> None:
    def news() -> str:
        raise CollectiveFailure("the rendezvous cannot be reached")

    engine.rendezvous(PeerFailure("10.0.0.1:7000", news=news))
    ended(engine)
    assert Host.made[0].gone
