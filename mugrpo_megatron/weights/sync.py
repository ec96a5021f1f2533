"""Sends the learner's weights, bucket by bucket, to the SGLang engines that share its devices.

A bucket is not copied to the engine's process: the message refers to its memory. On CUDA it is SGLang's
`flattened_bucket` (sglang/srt/weight_sync/tensor_bucket.py), an IPC handle with names, shapes and offsets; on CPU it is
shared memory.

    plan once      buckets of whole tensors in Hugging Face's names, the same on every rank
    every sync     fill bucket i (all ranks)  |  the engine loads bucket i - 1 (a thread of its leader)
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing

from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.files.scratch import MANAGER, SHORT_DIRECTORIES, SOCKET_PATH, Scratch
from mugrpo_megatron.files.scratch import SHARED_MEMORY as NAMES
from mugrpo_megatron.observe.environment import SHARED_MEMORY, SHARED_MEMORY_REMEDY
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.buckets import (
    Bucket,
    BucketPlan,
    build_plan,
    fill_bucket,
    local_shards,
    quantise_bucket,
    quantised_bucket,
)

MANAGER_SOCKET = "/torch-shm-dir-XXXXXX/manager.sock"
"""Path, below TMPDIR, of the socket of torch's manager of shared memory (torch/lib/libshm/manager.cpp)."""


class WeightReceiver(Protocol):
    """The methods of `engine.client.Engine` that a sync calls."""

    @property
    def readers(self) -> int:
        """Number of processes that read the weights: tensor parallel ranks times replicas."""

    def load_bucket(self, serialized: list[bytes]) -> None:
        """Load one bucket of weights; `serialized` has an item for each reader."""

    def set_version(self, version: int) -> None:
        """Set the weight version of later responses."""


@dataclass(frozen=True)
class WeightSync:
    """The plan of a sync and the memory that it uses; made once and used by every sync."""

    architecture: Architecture
    plan: BucketPlan
    shards: Mapping[str, torch.Tensor]
    """This rank's parameters (`buckets.local_shards`)."""
    engine_tensor: int
    """Tensor parallel size of each engine."""
    engine_group: dist.ProcessGroup | None
    """The ranks on the devices of this rank's engine, leader first: each serves the engine's rank on its own device.

    None for engines on CPU within a node, whose leader serves all of their ranks.
    """
    engine_buckets: Sequence[Bucket]
    """Each bucket of the plan as the engines load it: the bucket, or its tensors quantised."""
    staging: Sequence[torch.Tensor] | None
    """On CPU, up to two uint8 buffers that the buckets use in turn; they become shared memory when they are sent. None
    on CUDA."""

    @property
    def bytes(self) -> int:
        """Bytes that a sync sends to each engine."""
        return sum(bucket.bytes for bucket in self.engine_buckets)


@dataclass(frozen=True)
class SyncStats:
    version: int
    bytes: int
    buckets: int
    seconds: float


def build_weight_sync(
    chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    bucket_bytes: int,
    engine_tensor: int = 1,
    quantised: bool = False,
    engine_nodes: int = 1,
    timeout_s: float = 1800.0,
) -> WeightSync:
    """Make the plan and allocate the buffers; collective, once after the model is built.

    Engines span consecutive ranks: the leader of rank r's engine is rank r - r % engine_tensor.

    Args:
        bucket_bytes: limit of the two buckets that a sync holds at a time; only a parameter larger than half of it
            exceeds it.
        quantised: whether the engines run in fp8.
        engine_nodes: number of nodes that each engine spans.
        timeout_s: longest time that the other ranks wait for a leader whose engine loads a bucket.
    """
    # Buckets have half of the limit, because one is filled while the engine loads the one before it.
    plan = build_plan(chunks, architecture, bucket_bytes // 2)
    shards = local_shards(chunks, architecture)
    engine_buckets = [quantised_bucket(bucket) for bucket in plan.buckets] if quantised else plan.buckets
    if next(iter(shards.values())).is_cuda:
        group = _engine_group(engine_tensor, timeout_s)
        return WeightSync(architecture, plan, shards, engine_tensor, group, engine_buckets, None)
    share_memory_by_name()
    needed = sum([plan.largest] * len(plan.buckets[:2]))
    if shutil.disk_usage(SHARED_MEMORY).free < needed:
        raise _no_shared_memory(needed)
    staging = [torch.empty(plan.largest, dtype=torch.uint8) for _ in plan.buckets[:2]]
    # Within a node the leader serves all of its engine's processes through shared memory. Across nodes each process is
    # served by the rank on its own node, and these ranks exchange their buckets' names in a group.
    cpu_group = _engine_group(engine_tensor, timeout_s) if engine_nodes > 1 else None
    return WeightSync(architecture, plan, shards, engine_tensor, cpu_group, engine_buckets, staging)


def share_memory_by_name() -> None:
    """Let torch share CPU memory by name, because the engine's host gets bytes, which cannot carry a file
    descriptor."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    _sharing_folder()


@cache
def _sharing_folder() -> Path:
    """Start torch's manager of this process's shared memory, and make a folder that lists what the manager must remove.

    The path of the manager's socket is made short enough for a socket (SOCKET_PATH). Seconds after this process has
    ended, the manager removes the shared memory and its socket. If both processes are killed together, as by a job
    scheduler, a later start removes what the folder lists.
    """
    fits = len(os.fsencode(tempfile.gettempdir())) + len(MANAGER_SOCKET) <= SOCKET_PATH
    parent = None if fits else next((path for path in SHORT_DIRECTORIES if os.access(path, os.W_OK)), "/tmp")
    folder = Scratch("weights", parent=parent)
    # atexit is not used: its functions would also run in forks of this process, and they would not run here if
    # multiprocessing has started this process.
    Finalize(None, folder.remove, exitpriority=0)
    given = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = parent or tempfile.gettempdir()
    try:
        socket, *_ = torch.empty(1).share_memory_().untyped_storage()._share_filename_cpu_()
    finally:
        os.environ.pop("TMPDIR")
        if given is not None:
            os.environ["TMPDIR"] = given
    with suppress(OSError):  # on a full disk only the manager removes its socket
        (folder.path / MANAGER).write_bytes(socket)
    return folder.path


@cache
def _note_shared(name: str) -> None:
    """Add the name of a piece of shared memory to the list in this process's folder (`_sharing_folder`)."""
    # On a full disk the name is not noted, and only torch's manager removes the memory.
    with suppress(OSError), (_sharing_folder() / NAMES).open("a", encoding="utf-8") as file:
        file.write(f"{SHARED_MEMORY}{name}\n")


def sync(weight_sync: WeightSync, engine: WeightReceiver | None, version: int) -> SyncStats:
    """Load the learner's current weights into every leader's engine, as weight version `version`.

    Collective: every rank fills every bucket, and each leader lets its engine load the bucket. `engine` is None on
    ranks that do not lead one. The engine's weight memory must be awake. Its KV cache should still be asleep, so that
    buckets and cache do not need memory at the same time.

    Raises EngineFailure when this rank's engine refuses a bucket, after this rank has done its part for the others.
    """
    start = time.perf_counter()
    loading: Future[torch.Tensor] | None = None
    failure: EngineFailure | None = None
    # If a leader's engine does not run, the other ranks on its devices must not make handles that nobody opens.
    served = _vote_and_release(weight_sync, engine is not None or not _leads(weight_sync))
    # The engine's call blocks until it has loaded; a thread lets this rank gather the next bucket meanwhile.
    with ThreadPoolExecutor(1) as loader:
        for number in range(len(weight_sync.plan.buckets)):
            bucket, flat = fill_for_engines(weight_sync, number)
            if loading:
                # A failure does not end the loop: the other ranks' gathers need this rank's shards.
                failure = _result(loading) or failure
                served = _vote_and_release(weight_sync, served and failure is None)
            # A bucket is serialised only for an engine that loads it: torch counts the readers of CUDA memory that it
            # has shared (torch/multiprocessing/reductions.py), and a handle that is never opened would keep the memory.
            serialized = _serialize_for_engine(weight_sync, engine, bucket, flat) if served else []
            loading = loader.submit(_load, engine if served else None, serialized, flat)
            # After this, on CUDA only the future `loading` refers to the bucket's memory. The memory is freed when
            # `loading` becomes the next bucket's future, which is after the vote.
            del flat
        if loading:
            failure = _result(loading) or failure
            _vote_and_release(weight_sync, failure is None)
    if failure:
        raise failure
    if engine is not None:
        engine.set_version(version)
    return SyncStats(version, weight_sync.bytes, len(weight_sync.plan.buckets), time.perf_counter() - start)


def fill_for_engines(weight_sync: WeightSync, number: int) -> tuple[Bucket, torch.Tensor]:
    """Fill bucket `number` of the plan; returns the bucket as the engines load it, and its bytes. Collective."""
    bucket, engine_bucket = weight_sync.plan.buckets[number], weight_sync.engine_buckets[number]
    flat = _buffer(weight_sync, bucket, number)
    fill_bucket(bucket, weight_sync.shards, weight_sync.architecture, flat)
    if engine_bucket is bucket:
        return bucket, flat
    return engine_bucket, quantise_bucket(bucket, flat, engine_bucket)


def _buffer(weight_sync: WeightSync, bucket: Bucket, number: int) -> torch.Tensor:
    if weight_sync.staging is None:
        # Each bucket gets new memory. SGLang answers when its copies are queued on its stream, before they are done
        # (srt/managers/scheduler_components/weight_updater.py), so they could still read a buffer that is filled again.
        return torch.empty(bucket.bytes, dtype=torch.uint8, device="cuda")
    # On CPU the answer comes after the copy, so two buffers suffice: one is loaded while the other is filled.
    return weight_sync.staging[number % len(weight_sync.staging)]


def _load(engine: WeightReceiver | None, serialized: list[bytes], flat: torch.Tensor) -> torch.Tensor:
    """Load a bucket into the engine, if there is one; returns `flat`, so that the future keeps the bucket's memory."""
    if engine is not None:
        engine.load_bucket(serialized)
    return flat


def _result(loading: Future[torch.Tensor]) -> EngineFailure | None:
    """Wait until the engine has read a bucket; returns None, or the failure if it could not read it."""
    try:
        loading.result()
    except EngineFailure as failure:
        return failure
    return None


def _leads(weight_sync: WeightSync) -> bool:
    """Whether this rank may lead an engine: as the first of its `engine_group`, or if there are no such groups."""
    return weight_sync.engine_group is None or weight_sync.engine_group.rank() == 0


def _vote_and_release(weight_sync: WeightSync, ok: bool) -> bool:
    """Return whether `ok` is true on every rank of this rank's engine; on CUDA, free the memory that it has read."""
    # This exchange also tells the ranks that they may free a bucket's memory: the engine reads the memory of all of
    # them, but answers its leader alone.
    if weight_sync.engine_group is None:
        return ok
    votes = [ok] * weight_sync.engine_group.size()
    dist.all_gather_object(votes, ok, group=weight_sync.engine_group)
    if weight_sync.staging is None:
        # Without this call, torch would not free memory that no process reads any more until it next shares some.
        torch.cuda.ipc_collect()
    return all(votes)


def serialize(bucket: Bucket, flat: torch.Tensor) -> bytes:
    """Pickle the bucket for one reader; the bytes refer to the memory of `flat`."""
    pickled = io.BytesIO()
    try:
        ForkingPickler(pickled).dump(flattened_bucket(bucket, flat) if flat.is_cuda else named_tensors(bucket, flat))
    except RuntimeError as error:
        if "shared memory" in str(error):
            raise _no_shared_memory(flat.nbytes) from error
        raise
    if not flat.is_cuda and torch.multiprocessing.get_sharing_strategy() == "file_system":
        _note_shared(flat.untyped_storage()._share_filename_cpu_()[1].decode())
    return pickled.getvalue()


def _no_shared_memory(needed: int) -> UserError:
    usage = shutil.disk_usage(SHARED_MEMORY)
    return UserError(
        f"{SHARED_MEMORY}: {usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB are free, and the weights' "
        f"buffers need {needed / 2**20:,.1f} MiB; mount it larger (in a container: {SHARED_MEMORY_REMEDY})"
    )


def named_tensors(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The bucket's names and tensors, as `cpu.sglang.load_mapped` takes them."""
    return [(slot.name, slot.view(flat)) for slot in bucket.slots]


def flattened_bucket(bucket: Bucket, flat: torch.Tensor) -> dict[str, Any]:
    """The bucket in SGLang's format `flattened_bucket`: one tensor of bytes, and the place of each weight in it."""
    # SGLang's class FlattenedTensorMetadata is not used, because importing SGLang takes seconds. Its ModelRunner only
    # reads these attributes.
    metadata = [
        SimpleNamespace(
            name=slot.name,
            shape=torch.Size(slot.shape),
            dtype=slot.dtype,
            start_idx=slot.start,
            end_idx=slot.start + slot.bytes,
            numel=slot.bytes,
        )
        for slot in bucket.slots
    ]
    return {"flattened_tensor": flat[: bucket.bytes], "metadata": metadata}


def _serialize_for_engine(
    weight_sync: WeightSync, engine: WeightReceiver | None, bucket: Bucket, flat: torch.Tensor
) -> list[bytes]:
    """Serialise the bucket for each process that reads it; `engine` is None on ranks whose engine another rank leads.

    If ranks form an `engine_group`, each reader gets the bytes of the rank on its own device or node: a CUDA handle is
    valid on its device only, and a name in /dev/shm on its node.
    """
    if weight_sync.engine_group is None:
        return [serialize(bucket, flat) for _ in range(engine.readers if engine else 0)]
    if weight_sync.staging is None:
        # Another process reads the bucket next, and this stream may still be writing it.
        torch.cuda.current_stream().synchronize()
    gathered: list[bytes] = [b""] * weight_sync.engine_group.size()
    dist.all_gather_object(gathered, serialize(bucket, flat), group=weight_sync.engine_group)
    return gathered


def _engine_group(engine_tensor: int, timeout_s: float) -> dist.ProcessGroup:
    """The ranks whose devices this rank's engine uses."""
    group, _ = dist.new_subgroups(engine_tensor, timeout=timedelta(seconds=timeout_s))
    return group
