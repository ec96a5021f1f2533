"""The shared queue: every group goes to one engine, and a slow engine delays no other; the record of its load."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.engine.queue import CLAIM, MOST_LOADS, LoadReading, LoadRecord, PromptQueue
from tests.ranks import run_ranks


def shared() -> tuple[Counter[str], threading.Lock]:
    return Counter(), threading.Lock()


def queues(groups: range, engines: int) -> list[PromptQueue]:
    counters, lock = shared()

    def add(name: str, amount: int) -> int:
        with lock:
            counters[name] += amount
            return counters[name]

    return [PromptQueue(groups, engines, add) for _ in range(engines)]


@given(
    count=st.integers(0, 400),
    engines=st.integers(1, 5),
    slots=st.integers(1, 40),
    order=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=200),
)
def test_every_group_is_claimed_once_in_any_order_of_claims(
    count: int, engines: int, slots: int, order: list[tuple[int, int]]
) -> None:
    everyone = queues(range(1000, 1000 + count), engines)
    held, claimed = [0] * engines, []
    turns = [(engine % engines, done) for engine, done in order] + [(e, slots) for e in range(engines)] * (count + 1)
    for engine, done in turns:
        held[engine] = max(0, held[engine] - done)
        while taken := everyone[engine].take(held[engine], slots):
            assert len(taken) <= CLAIM
            held[engine] += len(taken)
            assert held[engine] <= 2 * slots
            claimed += taken
    assert sorted(claimed) == list(range(1000, 1000 + count))


def test_a_round_that_fits_is_shared_evenly() -> None:
    everyone = queues(range(30), 3)
    assert [len(queue.take(0, 128)) for queue in everyone] == [10, 10, 10]
    assert everyone[0].take(9, 128) == [], "the round has been given out"


def test_late_in_a_round_an_engine_holds_no_more_than_it_decodes() -> None:
    first, second = queues(range(100), 2)
    assert len(first.take(0, 10)) == 20
    assert len(second.take(0, 10)) == 20
    assert len(first.take(5, 10)) == 15
    assert len(second.take(0, 10)) == 20
    assert len(first.take(0, 10)) == 20, "25 are left, more than both decode"
    assert second.take(10, 10) == []
    assert len(second.take(8, 10)) == 2


def test_an_engine_with_long_responses_delays_no_other() -> None:
    slow, fast = queues(range(1000), 2)
    stuck = slow.take(0, 8)
    done = []
    while taken := fast.take(0, 8):
        done += taken
    assert sorted(stuck + done) == list(range(1000))
    assert len(stuck) == 16


def test_half_of_the_engines_failing_ends_the_round_for_all() -> None:
    everyone = queues(range(1000), 3)
    everyone[0].leave()
    assert everyone[1].take(0, 8)
    everyone[1].leave()
    assert everyone[2].take(0, 8) == []


def test_a_stop_ends_the_round_for_all() -> None:
    first, second = queues(range(1000), 2)
    first.close()
    assert second.take(0, 8) == []


def drain(groups: range) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    queue = PromptQueue(groups, dist.get_world_size(), lambda name, amount: store.add(f"queue/{name}", amount))
    claimed: list[int] = []
    while taken := queue.take(0, 4):
        claimed += taken
        queue.finished(tokens=len(taken))
    return claimed


@pytest.mark.process
def test_ranks_share_the_queue_through_the_store(tmp_path: Path) -> None:
    shares = run_ranks(2, drain, range(500))
    assert sorted(group for share in shares for group in share) == list(range(500))


@settings(max_examples=20)
@given(st.integers(0, 5000))
def test_a_long_generation_keeps_readings_that_are_equally_far_apart(count: int) -> None:
    record = LoadRecord()
    for number in range(count):
        record.add(LoadReading(at=float(number), tokens=number, running=1, queued=0, kv_use=0.5))
        assert len(record.loads) <= MOST_LOADS
    times = [load.at for load in record.loads]
    assert times[:1] == [0.0][:count]
    assert len({after - before for before, after in pairwise(times)}) <= 1
    assert len(times) >= min(count, MOST_LOADS // 2)
