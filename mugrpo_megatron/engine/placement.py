"""Decides on which ranks' devices each engine runs: a pure function with the same result on every rank.

The ranks of a node are divided into blocks of `engine.tensor` consecutive ranks. An engine runs on the devices of one
block and the block's first rank leads it, whatever the learner's layout. On CPU a node has at most one engine for every
`engine.tensor` cores, but one at least; the node's last blocks may then have none. With `engine.nodes` above 1 an
engine takes all devices of that many consecutive nodes: the first rank of the first node leads it, and the first rank
of each other node runs the engine's ranks of that node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.environment import rank_of_environment, usable_cores
from mugrpo_megatron.recipe.systems import EngineSection


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """A rank's place among the engines."""

    leads_engine: bool
    number: int
    """Number of the engine that this rank belongs to, counted over all nodes; rank 0 leads engine 0. A rank whose block
    has no engine gets the number of its node's last one."""
    engines: int
    """Number of engines on all nodes together."""
    local: int
    """Number of the engine among those of its node."""
    local_engines: int
    """Number of engines on this node."""
    gpu: int
    """Index on the node of the engine's first device; the engine uses one device for each tensor parallel rank."""
    node: int = 0
    """This node's index among the engine's nodes."""
    joins: bool = False
    """Whether this rank runs a follower node (`FollowerNode`) of an engine that another rank leads."""


ALONE = EngineSlot(leads_engine=True, number=0, engines=1, local=0, local_engines=1, gpu=0)
"""The slot of a run that has one process and one engine."""


def engine_slot(
    engine: EngineSection, rank: int, world: int, local_rank: int, local_world: int, cores: int | None
) -> EngineSlot:
    """The slot of a rank; `cores` is the number of the node's CPU cores if engines run on CPU, and None on CUDA.

    Raises UserError when the ranks of a node, or with `engine.nodes` above 1 the nodes, cannot be divided into engines.
    """
    if engine.nodes > 1:
        return _slot_across_nodes(engine, rank, world, local_world)
    size = engine.tensor
    if local_world % size:
        sizes = [divisor for divisor in range(1, local_world + 1) if local_world % divisor == 0]
        raise UserError(
            f"engine.tensor = {size} does not divide the {local_world} ranks of a node, and each engine takes the "
            f"devices of {size} ranks; set it to one of {sizes}, start another number of ranks on each node, or let an "
            "engine span nodes with engine.nodes"
        )
    blocks = local_world // size
    local_engines = blocks if cores is None else min(blocks, max(1, cores // size))
    block, rank_in_block = divmod(local_rank, size)
    node, local = rank // local_world, min(block, local_engines - 1)
    return EngineSlot(
        leads_engine=rank_in_block == 0 and block < local_engines,
        number=node * local_engines + local,
        engines=world // local_world * local_engines,
        local=local,
        local_engines=local_engines,
        gpu=block * size,
    )


def _slot_across_nodes(engine: EngineSection, rank: int, world: int, local_world: int) -> EngineSlot:
    """The slot of a rank if each engine takes whole nodes."""
    nodes = world // local_world
    if engine.tensor != engine.nodes * local_world:
        raise UserError(
            f"engine.nodes = {engine.nodes} nodes of {local_world} ranks make engines of {engine.nodes * local_world} "
            f"devices, but engine.tensor is {engine.tensor}; set engine.tensor to {engine.nodes * local_world}"
        )
    if nodes % engine.nodes:
        raise UserError(
            f"engine.nodes = {engine.nodes} does not divide the {nodes} nodes of this run; start the run on a multiple "
            f"of {engine.nodes} nodes"
        )
    node, local_rank = divmod(rank, local_world)
    number, engine_node = divmod(node, engine.nodes)
    return EngineSlot(
        leads_engine=local_rank == 0 and engine_node == 0,
        number=number,
        engines=nodes // engine.nodes,
        local=0,
        local_engines=1,
        gpu=0,
        node=engine_node,
        joins=local_rank == 0 and engine_node > 0,
    )


def slot_of_environment(engine: EngineSection, cuda: bool) -> EngineSlot:
    """Return this process's slot, from torchrun's variables; without these variables this process is the only one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return engine_slot(
        engine,
        rank=rank_of_environment(),
        world=world,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world=int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
        cores=None if cuda else usable_cores(),
    )
