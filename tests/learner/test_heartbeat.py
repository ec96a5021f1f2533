"""Ranks that wait for each other without a collective, and stop waiting when a rank dies."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from mugrpo_megatron.errors import CollectiveFailure
from mugrpo_megatron.learner.heartbeat import Heartbeat

PATIENCE_S = 1.0


def two(directory: Path) -> tuple[Heartbeat, Heartbeat]:
    store = dist.FileStore(str(directory / "store"), 1)
    return Heartbeat(store, 0, 2, "node 0", PATIENCE_S), Heartbeat(store, 1, 2, "node 1", PATIENCE_S)


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
    while "sync stage 3" not in first.last_heard():
        first.ask(lambda store: store.add("nothing", 0))
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
    assert everyone[0].last_heard() == "ranks 0-2 (node 0): start; ranks 3-4 (node 1): start"
    for one in everyone:
        one.leave()


def _told_of(account: str) -> int:
    """Number of ranks that an account names, alone or in a range."""
    return sum(int(last or first) - int(first) + 1 for first, last in re.findall(r"ranks? (\d+)(?:-(\d+))?", account))
