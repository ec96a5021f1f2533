"""Ranks that wait for each other without a collective, and stop waiting when a rank dies."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from mugrpo_megatron.errors import CollectiveFailure
from mugrpo_megatron.learner.groups import end_process
from mugrpo_megatron.learner.heartbeat import Heartbeat
from tests.ranks import RankFailure, run_ranks

PATIENCE_S = 1.0


def two(directory: Path, on_loss: Callable[[str], None] | None = None) -> tuple[Heartbeat, Heartbeat]:
    """Two ranks of which the first calls `on_loss` when the second is lost."""
    store = dist.FileStore(str(directory / "store"), 1)
    return Heartbeat(store, 0, 2, "node 0", PATIENCE_S, on_loss), Heartbeat(store, 1, 2, "node 1", PATIENCE_S)


def until_heard(first: Heartbeat, what: str) -> None:
    while what not in first.last_heard():
        first.ask(lambda store: store.add("nothing", 0))


def test_ranks_meet_however_late_one_is(tmp_path: Path) -> None:
    first, second = two(tmp_path)
    waited: list[float] = []
    late = threading.Thread(target=second.barrier)

    def meanwhile() -> None:
        waited.append(time.monotonic())
        if waited[-1] - waited[0] > 2 * PATIENCE_S and not late.ident:
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


def test_a_rank_that_falls_silent_is_named_with_what_it_did_last(tmp_path: Path) -> None:
    first, second = two(tmp_path)
    first.note("generate stage 3")
    second.note("sync stage 3")
    until_heard(first, "sync stage 3")
    assert first.likely_cause() == ""
    second.leave()
    with pytest.raises(CollectiveFailure) as failure:
        first.barrier()
    assert first.likely_cause().startswith("no heartbeat from rank 1 for over 0 s")
    text = str(failure.value)
    assert text.startswith("rank 0 of 2 failed in generate stage 3: no heartbeat from rank 1 for 1 s")
    assert "rank 1 (node 1): sync stage 3, silent for" in text
    assert "rank 0 (node 0): generate stage 3" in text
    first.leave()


def watched(directory: Path, lost: queue.Queue[str]) -> tuple[Heartbeat, Heartbeat]:
    first, second = two(directory, lost.put)
    second.note("update 7")
    until_heard(first, "update 7")
    first.note("update 7")
    return first, second


def test_a_rank_that_waits_in_cuda_is_ended_when_another_stops_beating(tmp_path: Path) -> None:
    lost: queue.Queue[str] = queue.Queue()
    first, second = watched(tmp_path, lost)
    assert first.loss() == ""
    second.leave(failed=True)
    account = lost.get(timeout=60)
    assert account.startswith("rank 0 of 2 failed in update 7: no heartbeat from rank 1 for over 1 s: dead, or cut off")
    assert "rank 1 (node 1): update 7, silent for" in account
    first.leave()


def test_a_rank_that_has_done_its_work_is_not_lost(tmp_path: Path) -> None:
    lost: queue.Queue[str] = queue.Queue()
    first, second = watched(tmp_path, lost)
    second.leave()
    while first.silent(PATIENCE_S) != [1]:
        first.ask(lambda store: store.add("nothing", 0))
    assert first.loss() == ""
    assert lost.empty()
    first.leave()


def wait_for_ever() -> None:
    """Rank 0 waits for what rank 1, which is lost, would send; as in CUDA, no exception reaches it."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    heartbeat = Heartbeat(store, rank, 2, f"node {rank}", PATIENCE_S, on_loss=None if rank else end_process)
    heartbeat.note("update 7")
    if rank == 1:
        while "update 7" not in heartbeat.last_heard().partition("rank 1")[0]:
            heartbeat.ask(lambda store: store.add("nothing", 0))
        heartbeat.leave(failed=True)
    threading.Event().wait()


@pytest.mark.process
def test_the_process_ends_with_code_1() -> None:
    with pytest.raises(RankFailure, match="rank 0 died with exit code 1"):
        run_ranks(2, wait_for_ever)


def test_a_store_that_is_gone_is_said(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, is_master=False, wait_for_workers=False)
    lonely = Heartbeat(client, 1, 2, "node 1", PATIENCE_S)
    lonely.ask(lambda store: store.add("nothing", 0))
    del server
    with pytest.raises(CollectiveFailure, match=r"rank 1 of 2 failed in start: the rendezvous .* cannot be reached"):
        lonely.barrier()
    while not lonely.likely_cause():
        assert lonely.silent(PATIENCE_S) == [], "a rank that cannot read the store must not accuse others"
    assert lonely.likely_cause().startswith("the rendezvous on rank 0's node was out of reach")
    lonely.leave()


def test_many_ranks_that_say_the_same_are_told_together(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    everyone = [Heartbeat(store, rank, 5, f"node {rank // 3}", PATIENCE_S) for rank in range(5)]
    while _told_of(everyone[0].last_heard()) < len(everyone):  # each says so in a thread of its own
        everyone[0].ask(lambda store: store.add("nothing", 0))
    expected = r"ranks 0-2 \(node 0\): start, \d+ s ago; ranks 3-4 \(node 1\): start, \d+ s ago"
    assert re.fullmatch(expected, everyone[0].last_heard())
    for one in everyone:
        one.leave()


def _told_of(account: str) -> int:
    """Number of ranks that an account names, alone or in a range."""
    return sum(int(last or first) - int(first) + 1 for first, last in re.findall(r"ranks? (\d+)(?:-(\d+))?", account))
