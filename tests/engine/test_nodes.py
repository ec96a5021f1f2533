"""Engine slots, where ranks of an engine over nodes meet, how the news of an end travels, the part on another node."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.engine import nodes
from mugrpo_megatron.engine.nodes import (
    PORTS,
    FollowerNode,
    NodeStatus,
    PeerFailure,
    free_port,
    leader_address,
    node_status,
)
from mugrpo_megatron.engine.placement import ALONE, EngineSlot, engine_slot
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, EngineStopped, UserError
from mugrpo_megatron.recipe.systems import EngineSection
from tests.engine.tiny import spec
from tests.patience import PATIENCE_S
from tests.refusals import refuses


def status(engine: int, node: int, address: str, rank0: str = "10.0.0.1") -> NodeStatus:
    return NodeStatus(engine, node, True, address, rank0, port=7000 + node, name=f"{engine}-{node}")


def test_ranks_meet_where_all_nodes_of_the_engine_reach_its_leader() -> None:
    """On its own node the name of rank 0 may mean loopback, so its engine is where the others see it."""
    statuses = [status(0, 1, "10.0.0.2"), status(0, 0, "127.0.1.1", rank0="127.0.1.1")]
    assert leader_address(statuses) == "10.0.0.1:7000"
    assert leader_address([status(1, 0, "10.0.0.3"), status(1, 1, "10.0.0.4")]) == "10.0.0.3:7000"
    address = leader_address([status(1, 0, "fd00::3"), status(1, 1, "fd00::4")])
    assert (address, PeerFailure(address).host) == ("[fd00::3]:7000", "fd00::3")


def test_what_a_rank_says_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    first, second = node_status(3, 1, running=False), node_status(3, 1, running=False)
    assert (first.engine, first.node, first.running) == (3, 1, False)
    assert first.address == first.rank0_address
    assert first.address in ("127.0.0.1", "::1")
    assert first.name != second.name


def test_a_free_port_has_free_ones_after_it() -> None:
    """Another process may take one meanwhile, but not every time."""

    def free(port: int) -> bool:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return True
        return False

    assert any(all(map(free, range(first, first + PORTS))) for first in (free_port() for _ in range(10)))


def test_the_first_process_that_ends_is_the_cause_and_the_store_is_asked_once_a_second() -> None:
    board: list[str] = []
    asked: list[int] = []

    def fetch() -> str:
        asked.append(1)
        return board[0] if board else ""

    first, second = (PeerFailure("", board.append, fetch) for _ in range(2))
    assert [first.cause() for _ in range(5)] == [""] * 5
    assert len(asked) == 1
    first.report("killed")
    second.report("its connection was closed")
    assert board == ["killed"]
    assert first.cause(now=True) == second.cause(now=True) == "killed"


SLOT = EngineSlot(False, number=2, engines=3, local=0, local_engines=1, gpu=0, node=1, joins=True)


class Host:
    """A host process that has loaded its model; `dies` makes it die, a wait looks at what ends it."""

    made: ClassVar[list[Host]] = []

    def __init__(self, environment: dict[str, str], cuda: bool, single_node: bool) -> None:
        self.environment, self.single_node = environment, single_node
        self.dies, self.gone = threading.Event(), False
        Host.made.append(self)

    def load(
        self,
        arguments: Sequence[dict[str, Any]],
        log: Path,
        cancelled: Callable[[], bool],
        peer_failure: Callable[[], str],
    ) -> None:
        self.arguments, self.cancelled, self.peer_failure = arguments, cancelled, peer_failure

    def receive(self, timeout_s: float, operation: str) -> tuple[str, None]:
        if operation == nodes.STARTING:
            return "ready", None
        while not self.dies.wait(0.01):
            if self.cancelled():
                self.gone = True
                raise EngineStopped("asked to stop")
            if cause := self.peer_failure():
                self.gone = True
                raise EngineFailure(cause)
        self.gone = True
        raise EngineFailure("SGLang's process ended")

    def end(self) -> None:
        self.gone = True


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FollowerNode:
    monkeypatch.setattr(nodes, "HostProcess", Host)
    monkeypatch.setattr(Host, "made", [])
    monkeypatch.setenv("RANK", "5")
    return FollowerNode(spec(checkpoint, tensor=2, nodes=2), checkpoint, tmp_path / "engine.log", SLOT)


def board() -> tuple[list[str], PeerFailure]:
    said: list[str] = []
    return said, PeerFailure("10.0.0.1:7000", said.append, lambda: said[0] if said else "")


def ended(engine: FollowerNode) -> None:
    assert engine._thread
    engine._thread.join(PATIENCE_S)
    assert not engine.running


def test_it_is_sglang_s_second_node_at_the_leader_s_address(engine: FollowerNode) -> None:
    assert not engine.running
    _, peers = board()
    engine.rendezvous(peers)
    (host,) = Host.made
    (arguments,) = host.arguments
    wanted = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:7000", "tp_size": 2}
    assert {name: arguments[name] for name in wanted} == wanted
    assert host.environment["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0"
    assert not host.single_node
    assert engine.running
    engine.stop()
    assert host.gone
    assert not engine.running


@pytest.mark.parametrize("leader_first", [False, True])
def test_its_end_is_told_unless_it_ends_with_the_leader_s(leader_first: bool, engine: FollowerNode) -> None:
    said, peers = board()
    engine.rendezvous(peers)
    if leader_first:
        said.append("on the node that leads it: killed")
        peers.cause(now=True)
    else:
        Host.made[0].dies.set()
    ended(engine)
    assert Host.made[0].gone
    assert said == (
        ["on the node that leads it: killed"]
        if leader_first
        else ["on its node 1, that of rank 5: SGLang's process ended"]
    )


def test_a_second_meeting_ends_the_process_of_the_first(engine: FollowerNode) -> None:
    for _ in range(2):
        engine.rendezvous(board()[1])
    first, second = Host.made
    assert (first.gone, second.gone, engine.running) == (True, False, True)
    engine.stop()


@pytest.mark.parametrize("leader_is_gone", [False, True])
def test_asleep_it_is_there_as_long_as_its_leader(engine: FollowerNode, leader_is_gone: bool) -> None:
    said, peers = board()
    engine.rendezvous(peers)
    said.extend(["killed"] * leader_is_gone)
    engine.sleep()
    assert engine.running is not leader_is_gone
    engine.stop()


def test_a_rendezvous_that_is_gone_ends_it(engine: FollowerNode) -> None:
    def fetch() -> str:
        raise CollectiveFailure("the rendezvous cannot be reached")

    engine.rendezvous(PeerFailure("10.0.0.1:7000", fetch=fetch))
    ended(engine)
    assert Host.made[0].gone


def slots(engine: EngineSection, nodes: int, local_world: int, cores: int | None = None) -> list[EngineSlot]:
    world = nodes * local_world
    return [
        engine_slot(engine, rank, world, local_rank=rank % local_world, local_world=local_world, cores=cores)
        for rank in range(world)
    ]


@given(nodes=st.integers(1, 4), tensor=st.sampled_from([1, 2, 4, 8]), blocks=st.integers(1, 8))
def test_every_device_belongs_to_one_engine_of_its_node(nodes: int, tensor: int, blocks: int) -> None:
    local_world = tensor * blocks
    found = slots(EngineSection(tensor=tensor), nodes, local_world)
    leaders = [(rank, one) for rank, one in enumerate(found) if one.leads_engine]
    assert [one.number for _, one in leaders] == list(range(nodes * blocks))
    assert all(one.engines == nodes * blocks for one in found)
    used = [(rank // local_world, one.gpu + shift) for rank, one in leaders for shift in range(tensor)]
    assert sorted(used) == [(node, gpu) for node in range(nodes) for gpu in range(local_world)]
    for rank, one in leaders:
        assert rank % local_world == one.gpu, "a leader sits on its engine's first device"


def test_a_world_of_one() -> None:
    assert slots(EngineSection(), 1, 1, cores=64) == [ALONE]


@pytest.mark.parametrize(("cores", "engines"), [(1, 1), (2, 2), (3, 3), (64, 8)])
def test_on_cpu_no_more_engines_than_cores(cores: int, engines: int) -> None:
    found = slots(EngineSection(), 2, 8, cores)
    assert sum(one.leads_engine for one in found) == found[0].engines == 2 * engines
    assert [rank for rank, one in enumerate(found) if one.leads_engine] == [*range(engines), *range(8, 8 + engines)]


@given(engines=st.integers(1, 3), span=st.integers(2, 4), local_world=st.sampled_from([1, 2, 8]))
def test_an_engine_of_several_nodes_takes_all_their_devices(engines: int, span: int, local_world: int) -> None:
    found = slots(EngineSection(tensor=span * local_world, nodes=span), engines * span, local_world)
    first_of_node = found[::local_world]
    assert [one.number for one in first_of_node] == [number for number in range(engines) for _ in range(span)]
    assert [one.node for one in first_of_node] == [*range(span)] * engines
    assert [one.leads_engine for one in first_of_node] == [one.node == 0 for one in first_of_node]
    assert [one.joins for one in first_of_node] == [one.node > 0 for one in first_of_node]
    assert sum(one.leads_engine or one.joins for one in found) == engines * span
    assert all(one.engines == engines and one.gpu == 0 for one in found)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"engine\.tensor = 3 does not divide the 8 ranks of a node.*\[1, 2, 4, 8\]"):
        slots(EngineSection(tensor=3), 2, 8)
    refuses(r"engine\.tensor = 16 does not divide the 8 ranks", slots, EngineSection(tensor=16), 2, 8)
    refuses(r"engine\.tensor is 8; set engine\.tensor to 16", slots, EngineSection(tensor=8, nodes=2), 2, 8)
    refuses(r"engine\.nodes = 2 does not divide the 3 nodes", slots, EngineSection(tensor=16, nodes=2), 3, 8)
