"""The learner's weights -> the SGLang engines that share its devices.

What travels is pickled for another process of the same machine, and no tensor is copied into the pickle. On CUDA it is
SGLang's `flattened_bucket` (sglang/srt/weight_sync/tensor_bucket.py): the IPC handle of one uint8 buffer and a list of
names, shapes and places. On CPU it is the named tensors, each a name of shared memory and a place in it.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing

from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.buckets import Bucket, Plan, build_plan, fill, held_shards


class Engine(Protocol):
    """What the bridge asks of an engine; `rollout.engine.Engine` is one."""

    def load_bucket(self, serialized: list[bytes]) -> None:
        """Load one serialised bucket, an item for each of the engine's tensor parallel ranks."""

    def set_version(self, version: int) -> None:
        """The weight version that responses carry from now on."""


@dataclass(frozen=True)
class Bridge:
    """Everything that stays the same from one sync to the next."""

    architecture: Architecture
    plan: Plan
    held: Mapping[str, torch.Tensor]
    engine_tensor: int
    """Tensor parallel size of each engine."""
    engine_group: dist.ProcessGroup | None
    """CUDA: the ranks on the devices of this rank's engine, the leader first. CPU: None, a leader serves alone."""
    staging: Sequence[torch.Tensor] | None
    """CPU: up to two buffers of uint8 that the buckets pass through in turn; shared memory where there is an engine."""


@dataclass(frozen=True)
class SyncStats:
    """What one sync moved."""

    version: int
    bytes: int
    buckets: int
    seconds: float


def build_bridge(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, bucket_bytes: int, engine_tensor: int = 1
) -> Bridge:
    """Work out the plan and set the memory aside; collective, once after the model is built.

    `bucket_bytes` bounds the memory of the bridge beside the model: two buckets are under way at a time.
    Engines sit on consecutive ranks: rank r serves the engine that rank r - r % engine_tensor leads, if it leads one.
    """
    plan = build_plan(chunks, architecture, bucket_bytes // 2)
    held = held_shards(chunks, architecture)
    if next(iter(held.values())).is_cuda:
        return Bridge(architecture, plan, held, engine_tensor, _engine_group(engine_tensor), None)
    # A file descriptor cannot travel inside a string; a name can.
    torch.multiprocessing.set_sharing_strategy("file_system")
    staging = [torch.empty(plan.largest, dtype=torch.uint8) for _ in plan.buckets[:2]]
    return Bridge(architecture, plan, held, engine_tensor, None, staging)


def sync(bridge: Bridge, engine: Engine | None, version: int) -> SyncStats:
    """Load the learner's current weights into the engine of each leader and stamp them with `version`.

    Collective: every rank goes through every bucket; `engine` is None on ranks that lead none. The engine's weight
    memory is awake and its KV cache still asleep, so that bucket and cache never need room at once. Every bucket exists
    whole on every rank anyway, so each leader hands its own copy to its engine.
    Raises EngineFailure when this rank's engine refuses a bucket, once the other ranks have all they need of this one.
    """
    start = time.perf_counter()
    loading: Future[torch.Tensor] | None = None
    failure: EngineFailure | None = None
    served = _agreed(bridge, engine is not None or not _leads(bridge))
    with ThreadPoolExecutor(1) as loader:
        for number, bucket in enumerate(bridge.plan.buckets):
            flat = buffer(bridge, bucket, number)
            fill(bucket, bridge.held, bridge.architecture, flat)
            # Memory whose handle nobody takes is never given back, so there is none for an engine that is not there.
            serialized = _serialize_for_engine(bridge, bucket, flat) if served else []
            if loading:
                failure = _result(loading) or failure
                served = _agreed(bridge, served and failure is None)
            loading = loader.submit(_load, engine if served else None, serialized, flat)
            del flat  # held by the load alone, so that memory is given back bucket by bucket
        if loading:
            failure = _result(loading) or failure
            _agreed(bridge, failure is None)
    if failure:
        raise failure
    if engine is not None:
        engine.set_version(version)
    return SyncStats(version, bridge.plan.bytes, len(bridge.plan.buckets), time.perf_counter() - start)


def buffer(bridge: Bridge, bucket: Bucket, number: int) -> torch.Tensor:
    """Memory for a bucket: one of two in turn on CPU; new on CUDA, where an engine may answer before it has read."""
    if bridge.staging is None:
        return torch.empty(bucket.bytes, dtype=torch.uint8, device="cuda")
    return bridge.staging[number % len(bridge.staging)]


def _load(engine: Engine | None, serialized: list[bytes], flat: torch.Tensor) -> torch.Tensor:
    """Hand a bucket to the engine and, once it is loaded, its memory back to the caller."""
    if engine is not None:
        engine.load_bucket(serialized)
    return flat


def _result(loading: Future[torch.Tensor]) -> EngineFailure | None:
    """Wait until the engine has read a bucket; returns why it did not."""
    try:
        loading.result()
    except EngineFailure as failure:
        return failure
    return None


def _leads(bridge: Bridge) -> bool:
    """Whether this rank would be the one to hand buckets to an engine: on CPU any may."""
    return bridge.engine_group is None or bridge.engine_group.rank() == 0


def _agreed(bridge: Bridge, well: bool) -> bool:
    """Whether all is well on every rank of this rank's engine; only then is a bucket's memory let go of.

    The engine reads the followers' memory as well, and only the leader knows when it is done.
    """
    if bridge.engine_group is None:
        return well
    votes = [well] * bridge.engine_group.size()
    dist.all_gather_object(votes, well, group=bridge.engine_group)
    torch.cuda.ipc_collect()
    return all(votes)


def serialize(bucket: Bucket, flat: torch.Tensor) -> bytes:
    """The bucket for one reader, as a reference to the memory of `flat`."""
    pickled = io.BytesIO()
    ForkingPickler(pickled).dump(flattened(bucket, flat) if flat.is_cuda else named(bucket, flat))
    return pickled.getvalue()


def named(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """What `rollout.cpu_engine.load_mapped` reads."""
    return [(slot.name, slot.view(flat)) for slot in bucket.slots]


def flattened(bucket: Bucket, flat: torch.Tensor) -> dict[str, Any]:
    """SGLang's flattened bucket: a single handle to open, however many tensors."""
    places = [
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
    return {"flattened_tensor": flat[: bucket.bytes], "metadata": places}


def _serialize_for_engine(bridge: Bridge, bucket: Bucket, flat: torch.Tensor) -> list[bytes]:
    """One serialisation for each tensor parallel rank of the engine; on CUDA each from that rank's own device."""
    if bridge.engine_group is None:
        return [serialize(bucket, flat) for _ in range(bridge.engine_tensor)]
    torch.cuda.current_stream().synchronize()  # another process is about to read what this stream has written
    gathered: list[bytes] = [b""] * bridge.engine_group.size()
    dist.all_gather_object(gathered, serialize(bucket, flat), group=bridge.engine_group)
    return gathered


def _engine_group(engine_tensor: int) -> dist.ProcessGroup:
    """The ranks whose devices this rank's engine uses."""
    mine, _ = dist.new_subgroups(engine_tensor)
    return mine
