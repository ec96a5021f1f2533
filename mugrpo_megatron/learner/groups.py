"""Process groups: the torch.distributed world, Megatron's groups in it, and errors that say why a collective failed."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed.rendezvous import rendezvous

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.errors import CollectiveFailure, UserError
from mugrpo_megatron.learner.heartbeat import Heartbeat, rank_list
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe.sections import RunSection
from mugrpo_megatron.recipe.systems import ParallelSection

ARRIVAL = timedelta(minutes=15)
"""Longest wait for the last rank to join at the start."""
ARRIVAL_POLL_S = 0.2
CHATTER = re.compile(r"\[\S+:\d+\] +| *(GLHF!|This (is typically|may)).*")
"""Matches what gloo adds to the reason of an error: its source file and line, and guesses."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank in the world and in each parallel dimension of the layout."""

    device: torch.device
    rank: int
    world: int
    local_rank: int
    local_world: int
    tp: int
    tp_size: int
    pp: int
    pp_size: int
    dp: int
    dp_size: int
    cp: int
    cp_size: int
    threads: int
    """Smallest number of CPU threads of any rank: nodes may have unequal numbers of cores."""
    heartbeat: Heartbeat | None = None
    """Heartbeat of this rank; None for a single process."""

    @property
    def last_pp_stage(self) -> bool:
        return self.pp == self.pp_size - 1

    @property
    def owns_tokens(self) -> bool:
        """Whether a gather takes this rank's tokens: the ranks for which this is true together hold each token once."""
        return self.last_pp_stage and self.tp == 0


def initialize(run: RunSection, layout: ParallelSection, threads: int = 0) -> Ranks:
    """Join the world (torchrun's, an existing one, or a world of one) and create the layout's process groups.

    The backend is gloo on CPU and NCCL on CUDA, with `run.collective_timeout_s`. Torch's and Megatron's random
    generators are seeded from `run.seed`. The number of CPU threads becomes `threads`, or with 0 this rank's share of
    the cores.

    Raises UserError when the layout does not divide the world or torch does not find the GPU that nvidia-smi finds, and
    CollectiveFailure when ranks do not join.
    """
    if run.deterministic:
        # torch's setting makes flash attention's backward pass and Megatron's dispatch of tokens to experts
        # deterministic too. cuBLAS needs a workspace of fixed size as well. NVLS is turned off, because it adds in the
        # switches, in the order in which the shards arrive.
        os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only helps to debug
    device = _device()
    if not dist.is_initialized():
        _join("nccl" if device.type == "cuda" else "gloo", timedelta(seconds=run.collective_timeout_s))
    block = layout.tensor * layout.pipeline * layout.context
    if dist.get_world_size() % block:
        raise UserError(
            f"parallel: tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} needs a "
            f"multiple of {block} ranks but {dist.get_world_size()} run; start a multiple of {block}, or lower a size"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        distributed_timeout_minutes=run.collective_timeout_s / 60,  # type: ignore[arg-type]  # goes into a timedelta
    )
    seed_generators(run.seed)
    return _ranks(device, _set_threads(threads, device), run.collective_timeout_s)


def seed_generators(seed: int) -> None:
    """Seed torch's and Megatron's random generators in this process; the process groups must have been created."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def shutdown(ranks: Ranks | None = None, failed: bool = False) -> None:
    """Stop the heartbeat and destroy every process group; if `failed`, the other ranks will count this one as lost."""
    if ranks and ranks.heartbeat:
        ranks.heartbeat.leave(failed)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@contextmanager
def shutdown_after(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutdown(ranks, failed=True)
        raise
    shutdown(ranks)


@contextmanager
def named_phase(ranks: Ranks, phase: str | None = None) -> Iterator[None]:
    """Turn the error of a failed collective inside the block into a CollectiveFailure.

    Its message names this rank, the phase, the likely cause and every rank's last heartbeat. `phase` also becomes the
    phase that this rank's heartbeat reports; without it the message names the phase that the heartbeat reports already.
    """
    if ranks.heartbeat and phase:
        ranks.heartbeat.note(phase)
    try:
        yield
    except CollectiveFailure:
        raise
    except RuntimeError as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            silence = ranks.heartbeat.likely_cause() if ranks.heartbeat else ""
            cause = silence or (
                "another rank is stuck, entered another collective, or needs longer than run.collective_timeout_s, "
                "which can be raised"
            )
        elif "connection" in text or "peer" in text:
            cause = (
                "another rank died or its node was cut off; its own log says why, and where it says nothing, memory "
                "usually ran out (`dmesg`)"
            )
        else:
            raise
        reports = ""
        if ranks.heartbeat:
            phase = phase or ranks.heartbeat.doing
            reports = f"; last heard: {ranks.heartbeat.last_heard()}"
        raise CollectiveFailure(
            f"rank {ranks.rank} of {ranks.world} failed in {phase}: {cause} ({CHATTER.sub('', str(error))}){reports}"
        ) from error


def _device() -> torch.device:
    if not finds_cuda():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def _join(backend: str, timeout: timedelta) -> None:
    """Create the world's process group once every rank has arrived. Raises CollectiveFailure if a rank has not arrived
    after `ARRIVAL`."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store: dist.Store = dist.HashStore()  # a single process needs no port
    if world > 1:
        # Nodes may start minutes apart, and the groups' timeout, which is for collectives, may be shorter than that.
        store, rank, world = next(rendezvous("env://", rank, world, timeout=ARRIVAL))
        store.set(f"arrived/{rank}", "")
        late = list(range(world))
        deadline = time.monotonic() + ARRIVAL.total_seconds()
        # The store is polled, because Python handles no signal during `store.wait`.
        while late and time.monotonic() < deadline:
            late = [other for other in late if not store.check([f"arrived/{other}"])]
            time.sleep(ARRIVAL_POLL_S if late else 0.0)
        if late:
            raise CollectiveFailure(
                f"rank {rank} of {world}: {rank_list(late)} did not join within {ARRIVAL.seconds // 60} minutes; "
                "the log of that rank or of its node says why"
            )
    group_store = dist.PrefixStore("world", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world, timeout=timeout)


def _set_threads(threads: int, device: torch.device) -> int:
    """Let this rank use `threads` CPU threads or, with 0, its share of the node's cores.

    Returns the smallest number of threads of any rank. Collective.
    """
    threads = threads or max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())))
    torch.set_num_threads(threads)
    fewest = torch.tensor(threads, device=device)
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    return int(fewest)


def _ranks(device: torch.device, threads: int, patience_s: float) -> Ranks:
    rank, world = dist.get_rank(), dist.get_world_size()
    node = f"node {os.environ.get('GROUP_RANK', '0')}, {socket.gethostname()}"
    store = dist.distributed_c10d._get_default_store()
    # If a rank is lost, gloo raises an error on the other ranks, but NCCL lets them wait in a kernel until its timeout.
    on_loss = end_process if device.type == "cuda" else None
    return Ranks(
        device=device,
        rank=rank,
        world=world,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        tp=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        cp=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        threads=threads,
        heartbeat=Heartbeat(store, rank, world, node, patience_s, on_loss) if world > 1 else None,
    )


def end_process(account: str) -> None:
    """Print `account`, which says why, and end the process at once with code 1.

    The process's main thread waits in a CUDA call, which no exception reaches. Nothing is cleaned up: engines end with
    the process that started them, and a resumed run removes partial files.
    """
    print(f"mugrpo: {account}\nThe same command continues the run.", file=sys.stderr, flush=True)
    os._exit(1)
