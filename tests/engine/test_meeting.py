"""Where an engine's ranks on several nodes meet, and how the news of a process's end reaches the other nodes."""

from __future__ import annotations

import socket

import pytest

from mugrpo_megatron.engine.meeting import PORTS, Bond, Part, address_of, free_port, part_of


def part(engine: int, node: int, here: str, first: str = "10.0.0.1") -> Part:
    return Part(engine, node, running=True, here=here, first=first, port=7000 + node, name=f"{engine}-{node}")


def test_the_first_engine_is_where_the_other_nodes_see_rank_0() -> None:
    """On its own node the name of rank 0 may mean loopback."""
    parts = [part(0, 1, "10.0.0.2"), part(0, 0, "127.0.1.1", first="127.0.1.1")]
    assert address_of(parts) == "10.0.0.1:7000"


def test_another_engine_is_where_its_leader_reaches_rank_0_from() -> None:
    assert address_of([part(1, 0, "10.0.0.3"), part(1, 1, "10.0.0.4")]) == "10.0.0.3:7000"
    assert address_of([part(1, 0, "fd00::3"), part(1, 1, "fd00::4")]) == "[fd00::3]:7000"


@pytest.mark.parametrize(("address", "host"), [("10.0.0.3:7000", "10.0.0.3"), ("[fd00::3]:7000", "fd00::3"), ("", "")])
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert Bond(address).host == host


def test_what_a_rank_says_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    one, other = part_of(3, 1, running=False), part_of(3, 1, running=False)
    assert (one.engine, one.node, one.running) == (3, 1, False)
    assert one.here == one.first
    assert one.here in ("127.0.0.1", "::1")
    assert one.name != other.name


def test_a_free_port_has_free_ones_after_it() -> None:
    first = free_port()
    for port in range(first, first + PORTS):
        with socket.socket() as probe:
            probe.bind(("", port))


def test_the_first_process_that_ends_is_the_cause() -> None:
    board: list[str] = []
    one, other = (Bond("", board.append, lambda: board[0] if board else "") for _ in range(2))
    assert one.broken() == ""
    one.ended("killed")
    other.ended("its connection was closed")
    assert board == ["killed"]
    assert one.broken(now=True) == other.broken(now=True) == "killed"


def test_the_store_is_asked_once_a_second() -> None:
    asked: list[int] = []

    def told() -> str:
        asked.append(1)
        return ""

    bond = Bond("", told=told)
    for _ in range(5):
        bond.broken()
    assert len(asked) == 1
    bond.broken(now=True)
    assert len(asked) == 2


def test_an_engine_of_one_node_has_nobody_to_tell() -> None:
    bond = Bond()
    bond.ended("killed")
    assert bond.broken() == ""
