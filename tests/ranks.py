"""Run a function on several gloo ranks, each a process of its own, and collect what every rank returns."""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.engine_server import forked_engines
from tests.forked import fork, fork_server
from tests.patience import PATIENCE_S


class RankFailure(AssertionError):
    """A rank raised, died or was too slow; carries the rank and its traceback."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S, compiled: bool = False
) -> list[Any]:
    """`[function(*args) of rank 0, of rank 1, ...]`, each in a process whose torch.distributed world is theirs.

    `function`, `args` and what is returned travel by pickle, so `function` is one of a module. The ranks meet through a
    file, not a port. What Megatron decorates with torch.compile, which takes seconds in every process, is compiled only
    where `compiled` says so. Raises RankFailure with the first rank's traceback when one raises, dies or exceeds
    `timeout_s`.
    """
    results = fork_server().Queue()
    with tempfile.TemporaryDirectory() as directory:
        meeting = Path(directory) / "rendezvous"
        ranks = [
            fork(_rank, rank, world_size, meeting, timeout_s, compiled, results, function, args)
            for rank in range(world_size)
        ]
        try:
            return _collect(ranks, results, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(ranks: list[Any], results: Any, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(ranks) if r not in found and p.exitcode is not None and p.exitcode != 0]
            if dead:
                raise RankFailure(f"rank {dead[0]} died with exit code {ranks[dead[0]].exitcode}") from None
            if time.monotonic() > deadline:
                late = sorted(set(range(len(ranks))) - set(found))
                raise RankFailure(f"ranks {late} did not finish within {timeout_s} s") from None
            continue
        if error is not None:
            raise RankFailure(f"rank {rank}:\n{error}")
        found[rank] = value
    return [found[rank] for rank in range(len(ranks))]


def _rank(
    rank: int,
    world_size: int,
    meeting: Path,
    timeout_s: float,
    compiled: bool,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    if not compiled:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when it is imported, which is when something is to be compiled
    torch.set_num_threads(1)
    store = dist.FileStore(str(meeting), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    try:
        with forked_engines():
            results.put((rank, function(*args), None))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still talks
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    if dist.is_initialized():
        dist.destroy_process_group()
