"""Sync: send the learner's weights, bucket by bucket, to the SGLang engines that share its devices.

A bucket is pickled by reference for another process of the machine: on CUDA as SGLang's `flattened_bucket`
(sglang/srt/weight_sync/tensor_bucket.py), an IPC handle with names, shapes and offsets; on CPU as shared memory.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing

from mugrpo_megatron.errors import EngineFailure
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


class WeightReceiver(Protocol):
    """What a sync uses of `engine.client.Engine`."""

    @property
    def readers(self) -> int:
        """Processes that read the weights: tensor parallel ranks and replicas."""

    def load_bucket(self, serialized: list[bytes]) -> None:
        """Load one serialised bucket, with an item for each reader."""

    def set_version(self, version: int) -> None:
        """Set the weight version that responses carry from now on."""


@dataclass(frozen=True)
class WeightSync:
    """The plan of a sync and the memory that it uses; made once and used by every sync."""

    architecture: Architecture
    plan: BucketPlan
    held: Mapping[str, torch.Tensor]
    engine_tensor: int
    """Tensor parallel size of each engine."""
    engine_group: dist.ProcessGroup | None
    """The ranks on the devices of this rank's engine, leader first: each serves the engine's rank on its own device.

    None on CPU where an engine stays on a node: its leader serves all of its ranks.
    """
    sent: Sequence[Bucket]
    """What the engines are sent for each bucket of the plan: the bucket, or its tensors quantised."""
    staging: Sequence[torch.Tensor] | None
    """CPU: up to two uint8 buffers that the buckets use in turn; shared memory on ranks that serve an engine's."""

    @property
    def bytes(self) -> int:
        """Bytes that a sync sends to each engine."""
        return sum(bucket.bytes for bucket in self.sent)


@dataclass(frozen=True)
class SyncStats:
    """Size and duration of one sync."""

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
    """Make the plan and allocate the buffers; collective, once after the model is built. `quantised`: fp8 engines.

    `bucket_bytes` limits the bridge's memory beyond the model: two buckets are in flight at a time. Engines span
    consecutive ranks, of `engine_nodes` nodes: the leader of rank r's engine is rank r - r % engine_tensor. The others
    wait up to `timeout_s` for a leader whose engine loads a bucket.
    """
    plan = build_plan(chunks, architecture, bucket_bytes // 2)
    shards = local_shards(chunks, architecture)
    sent = [quantised_bucket(bucket) for bucket in plan.buckets] if quantised else plan.buckets
    if next(iter(shards.values())).is_cuda:
        return WeightSync(
            architecture, plan, shards, engine_tensor, _engine_group(engine_tensor, timeout_s), sent, None
        )
    # A file descriptor cannot be sent in a string; a name can.
    torch.multiprocessing.set_sharing_strategy("file_system")
    staging = [torch.empty(plan.largest, dtype=torch.uint8) for _ in plan.buckets[:2]]
    group = _engine_group(engine_tensor, timeout_s) if engine_nodes > 1 else None
    return WeightSync(architecture, plan, shards, engine_tensor, group, sent, staging)


def sync(weight_sync: WeightSync, engine: WeightReceiver | None, version: int) -> SyncStats:
    """Load the learner's current weights into every leader's engine, as weight version `version`.

    Collective: every rank fills every bucket; `engine` is None on ranks that do not lead one. The engine's weight
    memory is awake and its KV cache still asleep, so bucket and cache do not need memory at the same time. Every rank
    has every bucket, so each leader sends its own copy to its engine.
    Raises EngineFailure when this rank's engine refuses a bucket, after this rank has done its part for the others.
    """
    start = time.perf_counter()
    loading: Future[torch.Tensor] | None = None
    failure: EngineFailure | None = None
    served = _all_ok(weight_sync, engine is not None or not _leads(weight_sync))
    with ThreadPoolExecutor(1) as loader:
        for number in range(len(weight_sync.plan.buckets)):
            bucket, flat = fill_for_engines(weight_sync, number)
            if loading:
                failure = _result(loading) or failure
                served = _all_ok(weight_sync, served and failure is None)
            # Only for an engine that loads it: CUDA memory whose handle is never opened would not be freed.
            serialized = _serialize_for_engine(weight_sync, engine, bucket, flat) if served else []
            loading = loader.submit(_load, engine if served else None, serialized, flat)
            del flat  # only the load holds it now, so memory is freed bucket by bucket
        if loading:
            failure = _result(loading) or failure
            _all_ok(weight_sync, failure is None)
    if failure:
        raise failure
    if engine is not None:
        engine.set_version(version)
    return SyncStats(version, weight_sync.bytes, len(weight_sync.plan.buckets), time.perf_counter() - start)


def fill_for_engines(weight_sync: WeightSync, number: int) -> tuple[Bucket, torch.Tensor]:
    """What the engines are sent for a bucket of the plan, and its bytes; collective."""
    bucket, sent = weight_sync.plan.buckets[number], weight_sync.sent[number]
    flat = _buffer(weight_sync, bucket, number)
    fill_bucket(bucket, weight_sync.held, weight_sync.architecture, flat)
    return (sent, flat) if sent is bucket else (sent, quantise_bucket(bucket, flat, sent))


def _buffer(weight_sync: WeightSync, bucket: Bucket, number: int) -> torch.Tensor:
    """Memory for a bucket: on CPU one of two in turn; on CUDA new, as an engine may answer before it has read all."""
    if weight_sync.staging is None:
        return torch.empty(bucket.bytes, dtype=torch.uint8, device="cuda")
    return weight_sync.staging[number % len(weight_sync.staging)]


def _load(engine: WeightReceiver | None, serialized: list[bytes], flat: torch.Tensor) -> torch.Tensor:
    """Load a bucket into the engine; returns the memory, so that it is kept until then."""
    if engine is not None:
        engine.load_bucket(serialized)
    return flat


def _result(loading: Future[torch.Tensor]) -> EngineFailure | None:
    """Wait until the engine has read a bucket; returns the failure if it did not."""
    try:
        loading.result()
    except EngineFailure as failure:
        return failure
    return None


def _leads(weight_sync: WeightSync) -> bool:
    """Whether this rank may lead an engine: on CPU any rank, where an engine stays on a node."""
    return weight_sync.engine_group is None or weight_sync.engine_group.rank() == 0


def _all_ok(weight_sync: WeightSync, ok: bool) -> bool:
    """Whether `ok` holds on every rank of this rank's engine; a bucket's memory is freed only after this.

    The engine also reads the memory of the other ranks, and only the leader knows when it has finished.
    """
    if weight_sync.engine_group is None:
        return ok
    votes = [ok] * weight_sync.engine_group.size()
    dist.all_gather_object(votes, ok, group=weight_sync.engine_group)
    if weight_sync.staging is None:
        torch.cuda.ipc_collect()
    return all(votes)


def serialize(bucket: Bucket, flat: torch.Tensor) -> bytes:
    """The bucket for one reader, as a reference to the memory of `flat`."""
    pickled = io.BytesIO()
    ForkingPickler(pickled).dump(flattened_bucket(bucket, flat) if flat.is_cuda else named_tensors(bucket, flat))
    return pickled.getvalue()


def named_tensors(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """What `cpu.sglang.load_mapped` reads."""
    return [(slot.name, slot.view(flat)) for slot in bucket.slots]


def flattened_bucket(bucket: Bucket, flat: torch.Tensor) -> dict[str, Any]:
    """SGLang's flattened bucket: one handle for all tensors."""
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


def _serialize_for_engine(
    weight_sync: WeightSync, engine: WeightReceiver | None, bucket: Bucket, flat: torch.Tensor
) -> list[bytes]:
    """The bucket, serialised for each reader; `engine` is None on ranks whose engine another rank leads.

    On CUDA each is from that rank's device, and in an engine of several nodes from its node: neither a CUDA handle nor
    a name in /dev/shm means anything on another one.
    """
    if weight_sync.engine_group is None:
        return [serialize(bucket, flat) for _ in range(engine.readers if engine else 0)]
    if weight_sync.staging is None:
        torch.cuda.current_stream().synchronize()  # another process will read what this stream wrote
    gathered: list[bytes] = [b""] * weight_sync.engine_group.size()
    dist.all_gather_object(gathered, serialize(bucket, flat), group=weight_sync.engine_group)
    return gathered


def _engine_group(engine_tensor: int, timeout_s: float) -> dist.ProcessGroup:
    """The ranks whose devices this rank's engine uses."""
    mine, _ = dist.new_subgroups(engine_tensor, timeout=timedelta(seconds=timeout_s))
    return mine
