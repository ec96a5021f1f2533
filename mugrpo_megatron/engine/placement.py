"""Which ranks lead an engine, and on which devices: a pure function, the same on every rank.

The ranks of a node are divided into blocks of `engine.tensor` consecutive ones. An engine runs on the devices of one
block and the block's first rank leads it, whatever the learner's layout. With `engine.nodes` above 1 an engine takes
all devices of that many consecutive nodes: the first rank of the first node leads it, and the first rank of each other
node joins it with the process that runs the engine's ranks of that node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.environment import rank_of_environment, usable_cores
from mugrpo_megatron.recipe.systems import EngineSection


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """The engine of one rank, and its index among the engines."""

    leads_engine: bool
    number: int
    """The engine whose block this rank belongs to, counted over the whole world; 0 is led by rank 0."""
    engines: int
    """Engines of the whole world."""
    local: int
    """The engine's index on its node."""
    local_engines: int
    """Engines of this node."""
    gpu: int
    """Index of the engine's first device on the node; it uses as many as it has tensor parallel ranks there."""
    node: int = 0
    """This node's index among the engine's nodes."""
    joins: bool = False
    """Whether this rank runs a process of an engine that a rank of another node leads."""


ALONE = EngineSlot(leads_engine=True, number=0, engines=1, local=0, local_engines=1, gpu=0)
"""The slot of a single process with a single engine."""


def engine_slot(
    engine: EngineSection, rank: int, world: int, local_rank: int, local_world: int, cores: int | None
) -> EngineSlot:
    """The slot of a rank. `cores`: the node's CPU cores where engines run on CPU, None on CUDA.

    Raises UserError when the node's ranks cannot be divided into engines.
    """
    if engine.nodes > 1:
        return _slot_across_nodes(engine, rank, world, local_world)
    size = engine.tensor
    if local_world % size:
        sizes = [d for d in range(1, local_world + 1) if local_world % d == 0]
        raise UserError(
            f"engine.tensor = {size} does not divide the {local_world} ranks of a node, and each engine takes the "
            f"devices of {size} ranks; set it to one of {sizes}, start another number of ranks on each node, or let an "
            "engine span nodes with engine.nodes"
        )
    fit = local_world // size
    here = fit if cores is None else min(fit, max(1, cores // size))
    block, place = divmod(local_rank, size)
    node = rank // local_world
    return EngineSlot(
        leads_engine=place == 0 and block < here,
        number=node * here + min(block, here - 1),
        engines=world // local_world * here,
        local=min(block, here - 1),
        local_engines=here,
        gpu=block * size,
    )


def _slot_across_nodes(engine: EngineSection, rank: int, world: int, local_world: int) -> EngineSlot:
    """The slot of a rank where each engine takes whole nodes."""
    nodes = world // local_world
    if engine.tensor != engine.nodes * local_world:
        raise UserError(
            f"engine.nodes = {engine.nodes} nodes of {local_world} ranks make engines of {engine.nodes * local_world} "
            f"devices, but engine.tensor is {engine.tensor}; set it to {engine.nodes * local_world}"
        )
    if nodes % engine.nodes:
        raise UserError(
            f"engine.nodes = {engine.nodes} does not divide the {nodes} nodes of this run; start a multiple of it"
        )
    node, local_rank = divmod(rank, local_world)
    number, inside = divmod(node, engine.nodes)
    return EngineSlot(
        leads_engine=local_rank == 0 and inside == 0,
        number=number,
        engines=nodes // engine.nodes,
        local=0,
        local_engines=1,
        gpu=0,
        node=inside,
        joins=local_rank == 0 and inside > 0,
    )


def slot_of_environment(engine: EngineSection, cuda: bool) -> EngineSlot:
    """This process's slot, from torchrun's variables; without them it is the only process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return engine_slot(
        engine,
        rank=rank_of_environment(),
        world=world,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world=int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
        cores=None if cuda else usable_cores(),
    )
