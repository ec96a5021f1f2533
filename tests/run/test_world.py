"""Ranks that wait for one another hear of a stop and of a failure."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.distributed as dist

from mugrpo_megatron.errors import CollectiveFailure
from mugrpo_megatron.learner.groups import Ranks
from mugrpo_megatron.learner.heartbeat import Heartbeat
from mugrpo_megatron.run import connected
from mugrpo_megatron.run.connected import ConnectedWorld, broadcast_failure, open_world
from mugrpo_megatron.run.stopping import StopRequest
from tests.ranks import run_ranks

pytestmark = pytest.mark.process


def opened(patience_s: float = 60) -> ConnectedWorld:
    rank, world = dist.get_rank(), dist.get_world_size()
    heartbeat = Heartbeat(dist.distributed_c10d._get_default_store(), rank, world, f"node {rank}", patience_s)
    values: dict[str, Any] = {"rank": rank, "world": world, "heartbeat": heartbeat}
    ranks = cast(Ranks, type("Some", (), values)())
    connected = open_world(ranks, 60, engines=1, stop=StopRequest())
    assert isinstance(connected, ConnectedWorld)
    return connected


def waits_and_is_asked() -> bool:
    """Rank 1 is asked while it waits for rank 0, which generates until it hears of it."""
    world = opened()
    if world.ranks.rank == 0:
        while not world.stop.poll():
            pass
        world.barrier()
    else:
        world.barrier(world.stop.request)
    return world.any_rank(world.stop.requested)


def waits_for_a_rank_that_fails() -> str:
    world = opened()
    try:
        with broadcast_failure(world.ranks):
            if world.ranks.rank == 1:
                raise ValueError("no such file\nand more")
            world.barrier()
    except (CollectiveFailure, ValueError) as error:
        return str(error)
    return ""


def stops_while_another_rank_is_dead() -> str:
    world = opened(patience_s=20)  # a heartbeat every 2 s
    heartbeat = world.ranks.heartbeat
    assert heartbeat
    heartbeat.ask(lambda store: store.num_keys())  # after the first heartbeat
    if world.ranks.rank == 1:
        heartbeat.leave()
        return ""
    connected.STOP_PATIENCE_S = 0.0
    world.stop.request()
    try:
        world.barrier()
    except CollectiveFailure as error:
        return str(error)
    return "it went on"


def test_a_rank_asked_to_stop_gives_up_a_dead_one_early() -> None:
    waiting, _ = run_ranks(2, stops_while_another_rank_is_dead)
    assert waiting == "rank 0 of 2 ends in start: the run stops, and there is no heartbeat from rank 1"


def test_a_rank_asked_in_a_barrier_tells_the_one_that_it_waits_for() -> None:
    assert run_ranks(2, waits_and_is_asked) == [True, True]


def test_a_rank_that_fails_ends_the_wait_of_the_others() -> None:
    waiting, _ = run_ranks(2, waits_for_a_rank_that_fails)
    assert waiting == "rank 0 of 2 ends in start: rank 1 failed: no such file"
