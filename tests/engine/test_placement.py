"""Engine slots: every device serves one engine, every engine stays on its node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.engine.placement import ALONE, EngineSlot, engine_slot
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.systems import EngineSection
from tests.refusals import refuses


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
    refuses(r"engine\.tensor is 8; set it to 16", slots, EngineSection(tensor=8, nodes=2), 2, 8)
    refuses(r"engine\.nodes = 2 does not divide the 3 nodes", slots, EngineSection(tensor=16, nodes=2), 3, 8)
