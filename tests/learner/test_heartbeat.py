"""Ranks that wait for each other without a collective, and stop waiting when a rank dies."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mugrpo_megatron.errors import CollectiveFailure
from mugrpo_megatron.learner import heartbeat
from mugrpo_megatron.learner.groups import end_process
from mugrpo_megatron.learner.heartbeat import BEATS_IN_PATIENCE, Heartbeat
from tests import patience
from tests.ranks import RankFailure, run_ranks

PATIENCE_S = 10.0
INTERVAL_S = PATIENCE_S / BEATS_IN_PATIENCE


class Clock:
    """Of all heartbeats: it stands still but for `tick`, so that no rank is silent because the machine is busy."""

    def __init__(self) -> None:
        self.now = 100.0

    def tick(self, seconds: float, *beating: Heartbeat) -> None:
        """Go on; those that beat do so after each interval, so that none of them has been out of reach."""
        for _ in range(round(seconds / INTERVAL_S)):
            self.now += INTERVAL_S
            for rank in beating:
                for _ in range(2):  # the second is answered after the heartbeat
                    rank.ask(lambda store: store.add("nothing", 0))


class Requests(queue.Queue[Any]):
    """Waits for a request alone. A real time limit could end between two steps of a test on a busy machine, and the
    thread would send a heartbeat that the test did not ask for."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return super().get(block)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(heartbeat, "queue", SimpleNamespace(Queue=Requests, Empty=queue.Empty))
    return clock


def two(directory: Path, on_loss: Callable[[str], None] | None = None) -> tuple[Heartbeat, Heartbeat]:
    """Two ranks of which the first calls `on_loss` when the second is lost."""
    store = dist.FileStore(str(directory / "store"), 1)
    return Heartbeat(store, 0, 2, "node 0", PATIENCE_S, on_loss), Heartbeat(store, 1, 2, "node 1", PATIENCE_S)


def gone(rank: Heartbeat, failed: bool = False) -> None:
    """Leave, with the last heartbeat written: on a busy machine that takes longer than `leave` waits."""
    rank.leave(failed)
    rank._thread.join()


def test_a_heartbeat_that_comes_just_after_this_rank_reads_is_not_missed(tmp_path: Path, clock: Clock) -> None:
    """A stopping rank would give up one that lives."""
    first, second = two(tmp_path)
    clock.tick(INTERVAL_S, second, first)
    clock.tick(INTERVAL_S, first, second)
    assert first.silent(0.9 * INTERVAL_S) == [1], "one interval went by without a new heartbeat"
    assert first.missed() == []
    clock.tick(INTERVAL_S, first)  # it reads the late one
    clock.tick(INTERVAL_S, first)
    assert first.missed() == []
    clock.tick(INTERVAL_S, first)
    assert first.missed() == [1]
    gone(first)
    gone(second)


def test_ranks_meet_however_late_one_is(tmp_path: Path, clock: Clock) -> None:
    first, second = two(tmp_path)
    begin = clock.now
    late = threading.Thread(target=second.barrier)

    def meanwhile() -> None:
        if clock.now - begin < 2 * PATIENCE_S:
            clock.tick(INTERVAL_S, second, first)
        elif not late.ident:
            late.start()

    first.barrier(meanwhile)
    assert late.ident, "the first was not to leave before the second came"
    late.join()
    second_time = threading.Thread(target=second.barrier)
    second_time.start()
    first.barrier()
    second_time.join()
    first.leave()
    second.leave()


def test_a_rank_that_falls_silent_is_named_with_what_it_did_last(tmp_path: Path, clock: Clock) -> None:
    first, second = two(tmp_path)
    first.note("generate stage 3")
    second.note("sync stage 3")
    clock.tick(INTERVAL_S, second, first)
    assert first.likely_cause() == ""
    gone(second)
    with pytest.raises(CollectiveFailure) as failure:
        first.barrier(lambda: clock.tick(2 * PATIENCE_S, first))
    assert first.likely_cause().startswith("no heartbeat from rank 1 for over 2 s")
    text = str(failure.value)
    assert text.startswith("rank 0 of 2 failed in generate stage 3: no heartbeat from rank 1 for 10 s")
    assert "rank 1 (node 1): sync stage 3, silent for" in text
    assert "rank 0 (node 0): generate stage 3" in text
    first.leave()


def test_a_rank_that_stops_before_its_first_heartbeat_is_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    lonely = Heartbeat(store, 0, 3, "node 0", PATIENCE_S)
    clock.tick(INTERVAL_S, lonely)
    assert lonely.loss() == "", "it may still come"
    sentence = r"no heartbeat from ranks 1-2 for 10 s; last heard: rank 0 \(node 0\): start; ranks 1-2: never heard"
    with pytest.raises(CollectiveFailure, match=sentence):
        lonely.barrier(lambda: clock.tick(2 * PATIENCE_S, lonely))
    assert "no heartbeat from ranks 1-2" in lonely.loss(), "nor in CUDA"
    lonely.leave()


def watched(directory: Path, clock: Clock, lost: queue.Queue[str]) -> tuple[Heartbeat, Heartbeat]:
    first, second = two(directory, lost.put)
    first.note("update 7")
    second.note("update 7")
    clock.tick(INTERVAL_S, second, first)
    return first, second


def test_a_rank_that_waits_in_cuda_is_ended_when_another_stops_beating(tmp_path: Path, clock: Clock) -> None:
    lost: queue.Queue[str] = queue.Queue()
    first, second = watched(tmp_path, clock, lost)
    assert first.loss() == ""
    gone(second, failed=True)
    clock.tick(INTERVAL_S, first)
    clock.tick(2 * PATIENCE_S, first)
    account = lost.get(timeout=patience.PATIENCE_S)
    assert account.startswith(
        "rank 0 of 2 failed in update 7: no heartbeat from rank 1 for over 10 s: dead, stopped or cut off"
    )
    assert "rank 1 (node 1): update 7, silent for" in account
    first.leave()


def test_a_rank_that_has_done_its_work_is_not_lost(tmp_path: Path, clock: Clock) -> None:
    lost: queue.Queue[str] = queue.Queue()
    first, second = watched(tmp_path, clock, lost)
    gone(second)
    clock.tick(INTERVAL_S, first)
    clock.tick(2 * PATIENCE_S, first)
    assert first.silent(PATIENCE_S) == [1]
    assert first.loss() == ""
    assert lost.empty()
    first.leave()


def wait_for_ever() -> None:
    """Rank 0 waits for what rank 1, which is lost, would send; as in CUDA, no exception reaches it."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    mine = Heartbeat(store, rank, 2, f"node {rank}", 3.0, on_loss=None if rank else end_process)
    mine.note("update 7")
    if rank == 1:
        while "update 7" not in mine.last_heard().partition("rank 1")[0]:
            mine.ask(lambda store: store.add("nothing", 0))
        mine.leave(failed=True)
    threading.Event().wait()


@pytest.mark.process
def test_the_process_ends_with_code_1() -> None:
    with pytest.raises(RankFailure, match="rank 0 died with exit code 1"):
        run_ranks(2, wait_for_ever)


def test_a_store_that_is_gone_is_said(tmp_path: Path, clock: Clock) -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, is_master=False, wait_for_workers=False)
    lonely = Heartbeat(client, 1, 2, "node 1", PATIENCE_S)
    lonely.ask(lambda store: store.add("nothing", 0))
    del server
    with pytest.raises(CollectiveFailure, match=r"rank 1 of 2 failed in start: the rendezvous .* cannot be reached"):
        lonely.barrier()
    clock.tick(PATIENCE_S)
    assert lonely.silent(PATIENCE_S) == [], "a rank that cannot read the store must not accuse others"
    assert lonely.likely_cause().startswith("the rendezvous on rank 0's node was out of reach")
    lonely.leave()


def test_many_ranks_that_say_the_same_are_told_together(tmp_path: Path, clock: Clock) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    everyone = [Heartbeat(store, rank, 5, f"node {rank // 3}", PATIENCE_S) for rank in range(5)]
    clock.tick(INTERVAL_S, *everyone)
    clock.tick(INTERVAL_S, everyone[0])
    expected = r"ranks 0-2 \(node 0\): start, \d+ s ago; ranks 3-4 \(node 1\): start, \d+ s ago"
    assert re.fullmatch(expected, everyone[0].last_heard())
    for one in everyone:
        one.leave()
