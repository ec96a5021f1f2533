"""The engines of a run: nodes of one engine start together, those that fail come back, the first sync is compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from mugrpo_megatron.engine.nodes import NodeStatus, PeerFailure
from mugrpo_megatron.engine.placement import ALONE
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import EngineSection
from mugrpo_megatron.run import engines as engines_module
from mugrpo_megatron.run.engines import Engines, rendezvous, start_engines
from mugrpo_megatron.run.leader import Launched, LedEngine


class World:
    """A rank's world; the others' parts are given."""

    def __init__(self, *others: NodeStatus | None) -> None:
        self._others, self.board = others, dict[str, str]()
        self.barriers = 0

    def gather(self, value: Any) -> list[Any]:
        return [value, *self._others]

    def store_set(self, name: str, text: str) -> None:
        self.board[name] = text

    def store_get(self, name: str) -> str:
        return self.board.get(name, "")

    def barrier(self) -> None:
        self.barriers += 1


class Own:
    """What this rank runs of an engine."""

    def __init__(self, engine: int, node: int, running: bool) -> None:
        self.slot, self.running = SimpleNamespace(number=engine, node=node), running
        self.met: list[PeerFailure] = []
        self.slept = 0

    def rendezvous(self, peers: PeerFailure) -> None:
        self.met.append(peers)

    def sleep(self) -> None:
        self.slept += 1


def other(engine: int, node: int, running: bool) -> NodeStatus:
    return NodeStatus(engine, node, running, f"10.0.{engine}.{node}", "10.0.0.0", 7000, f"start-{engine}-{node}")


@pytest.mark.parametrize("node", [0, 1])
def test_nothing_happens_while_all_run(node: int) -> None:
    own = Own(0, node, running=True)
    world = World(other(0, 1 - node, True), other(1, 0, False), other(1, 1, False), None)
    assert rendezvous(world, own) == ""  # type: ignore[arg-type]
    assert own.met == []


def test_a_rank_that_runs_no_part_takes_part_in_the_vote() -> None:
    assert rendezvous(World(other(0, 0, False)), None) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(("mine", "leader"), [(True, False), (False, True), (False, False)])
def test_all_start_where_one_does_not_run(mine: bool, leader: bool) -> None:
    own, world = Own(1, 1, mine), World(other(0, 0, True), other(0, 1, True), other(1, 0, leader))
    rendezvous(world, own)  # type: ignore[arg-type]
    (peers,) = own.met
    assert peers.address == "10.0.1.0:7000"
    peers.report("killed")
    assert world.board == {"engine/start-1-0": "killed"}
    assert peers.cause(now=True) == "killed"


@pytest.mark.parametrize(("mine", "said"), [(True, "the engine's processes on its nodes 1, 2 have ended"), (False, "")])
def test_a_leader_that_ran_hears_which_nodes_did_not(mine: bool, said: str) -> None:
    own = Own(0, 0, mine)
    assert rendezvous(World(other(0, 1, False), other(0, 2, False), other(0, 3, True)), own) == said  # type: ignore[arg-type]
    assert [peers.address for peers in own.met]


@pytest.mark.parametrize(("nodes", "barriers", "slept"), [(1, 1, 0), (2, 2, 1)])
def test_parts_sleep_after_their_leader(nodes: int, barriers: int, slept: int) -> None:
    world, own = World(), Own(0, 1, True)
    Engines(world, EngineSection(nodes=nodes, tensor=nodes), None, None, own).sleep()  # type: ignore[arg-type]
    assert (world.barriers, own.slept) == (barriers, slept)


def test_an_engine_that_fails_as_it_falls_asleep_is_reported_later() -> None:
    def sleep() -> None:
        raise failure

    world, failure = World(), EngineFailure("an illegal memory access was encountered")
    leader: Any = LedEngine(engine=cast(Any, SimpleNamespace(sleep=sleep)))
    engines = Engines(world, EngineSection(), None, leader, awake=True)  # type: ignore[arg-type]
    engines.sleep()
    assert (engines.awake, leader.failure, leader.failures_in_a_row, world.barriers) == (False, failure, 1, 1)


@pytest.mark.parametrize(("mode", "said"), [("every", ["SGLang pads heads"]), ("never", [])])
def test_a_run_says_at_its_start_when_it_cannot_compare(
    mode: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "uncheckable_reason", lambda weight_sync: "SGLang pads heads")
    recipe = Recipe.model_validate({"engine": {"check_weights": mode, "between_stages": "restart"}})
    console = Console(width=200, record=True)
    world: Any = SimpleNamespace(barrier=lambda: None, gather=lambda value: [value], broadcast=lambda value: value)
    launched = Launched(ALONE, tmp_path, None, None)
    start_engines(recipe, launched, world, None, None, Display(console, None))  # type: ignore[arg-type]
    lines = [f"The engine's weights are not compared with the learner's: {reason}." for reason in said]
    assert console.export_text().splitlines()[1:] == lines
