"""Whether an engine holds the learner's weights: checksums of every tensor, compared on each leader."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mugrpo_megatron.errors import EngineFailure, TrainingFailure
from mugrpo_megatron.files.tensors import Sums, dtype_name, raw_bytes
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.buckets import Bucket, fill
from mugrpo_megatron.weights.sync import Bridge, buffer
from mugrpo_megatron.weights.table import DIMENSION, Entry

VOCAB_MULTIPLE = 64
"""SGLang pads its vocabulary to a multiple of this with zero rows."""

FUSED = (
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)


def engine_name(hf_name: str) -> str:
    """The engine's parameter that holds a Hugging Face tensor; several tensors share one, one after another."""
    for pattern, replacement in FUSED:
        if pattern.search(hf_name):
            return pattern.sub(replacement, hf_name)
    return hf_name


def engine_shards(
    entry: Entry, name: str, tensor: torch.Tensor, size: int, architecture: Architecture
) -> Iterator[torch.Tensor]:
    """What each of `size` tensor parallel ranks of the engine keeps of a Hugging Face tensor, in rank order."""
    for rank in range(size):
        if entry.row.form == "vocab":
            yield _vocab_shard(tensor, size, rank)
        elif entry.row.split == "none":
            yield tensor
        elif entry.row.form == "qkv" and ".q_proj." not in name:
            # With fewer key/value heads than ranks each head is held by several of them.
            parts = min(size, architecture.transformer["num_query_groups"])
            yield tensor.chunk(parts, dim=0)[rank * parts // size]
        else:
            yield tensor.chunk(size, dim=DIMENSION[entry.row.split])[rank]


def padded_on_cpu(architecture: Architecture, size: int) -> bool:
    """Whether SGLang's CPU engine pads heads or experts to share them out (srt/configs/update_config.py)."""
    uneven_heads = architecture.transformer["num_query_groups"] % size != 0
    uneven_experts = architecture.experts > 0 and architecture.transformer["moe_ffn_hidden_size"] % (32 * size) != 0
    return size > 1 and (uneven_heads or uneven_experts)


def _vocab_shard(tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    rows = -(-len(tensor) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // size
    held = tensor[rank * rows : (rank + 1) * rows]
    return torch.cat([held, held.new_zeros(rows - len(held), *held.shape[1:])])


class SummedEngine(Protocol):
    """What the check asks of an engine; `rollout.engine.Engine` is one."""

    def checksums(self) -> list[Sums]:
        """For each tensor parallel rank: the sums of every parameter that it holds."""


class WeightMismatch(TrainingFailure):
    """An engine's weights are not the learner's; names the tensors."""


def unchecked(bridge: Bridge) -> str:
    """Why the engines' weights cannot be compared with the learner's, empty where they can."""
    if bridge.staging is not None and padded_on_cpu(bridge.architecture, bridge.engine_tensor):
        return (
            f"on CPU SGLang pads this model's heads or experts for engine.tensor = {bridge.engine_tensor}, in a layout "
            "of its own"
        )
    return ""


def check(bridge: Bridge, engine: SummedEngine | None) -> int:
    """Compare every tensor of each leader's engine with the learner's, bit by bit; returns how many were compared.

    Collective, and it takes a pass over all weights; `engine` is None on ranks that have none to compare. A tensor that
    the engine holds in another type is compared in that type. Returns 0 without a look where `unchecked` says why.
    Raises WeightMismatch on every rank when a tensor of any engine differs, is missing, or was never filled by the
    learner; EngineFailure when this rank's engine fails, once the others have all they need of this rank.
    """
    if unchecked(bridge):
        return 0
    found: list[Sums] = []
    failure: EngineFailure | None = None
    if engine is not None:
        try:
            found = [_named_once(sums, bridge.architecture) for sums in engine.checksums()]
        except EngineFailure as error:
            failure = error
    expected = expected_checksums(bridge, found)
    faults: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(faults, _difference(expected, found))
    for rank, fault in enumerate(faults):
        if fault:
            where = f"the engine that rank {rank} leads" if len(faults) > 1 else "the engine"
            raise WeightMismatch(
                f"{where} does not hold the learner's weights: {fault}. Its responses would be another policy's. "
                "`python -m checkpoints_convert.verify` tells whether the weight table is right; "
                'engine.check_weights = "never" goes on without this check'
            )
    if failure:
        raise failure
    return sum(len(names) for names in expected)


def expected_checksums(bridge: Bridge, found: list[Sums]) -> list[Sums]:
    """What the sums of an engine should be, in the types that it `found`; collective, empty where nothing was found."""
    hashes: list[dict[str, hashlib._Hash]] = [{} for _ in found]
    dtypes: list[dict[str, str]] = [{name: dtype for name, (dtype, _) in sums.items()} for sums in found]
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for number, bucket in enumerate(bridge.plan.buckets):
            flat = buffer(bridge, bucket, number)
            fill(bucket, bridge.held, bridge.architecture, flat)
            if found:
                list(pool.map(lambda shards: _add(shards, hashes, dtypes), _by_name(bucket, flat, bridge)))
    return [
        {name: (dtypes[rank].get(name, ""), total.hexdigest()) for name, total in by_name.items()}
        for rank, by_name in enumerate(hashes)
    ]


Shards = list[tuple[int, str, torch.Tensor]]
"""(tensor parallel rank of the engine, the engine's name, part of that parameter)"""


def _by_name(bucket: Bucket, flat: torch.Tensor, bridge: Bridge) -> list[Shards]:
    """The bucket's tensors as the engine keeps them, those of one parameter together and in order.

    The plan keeps q, k, v and gate, up and the experts in order: the bytes of a fused parameter are theirs in sequence.
    """
    parts: defaultdict[str, Shards] = defaultdict(list)
    for piece in bucket.pieces:
        for slot in piece.slots:
            name = engine_name(slot.name)
            whole = slot.view(flat)
            shards = engine_shards(piece.entry, slot.name, whole, bridge.engine_tensor, bridge.architecture)
            parts[name] += [(rank, name, shard) for rank, shard in enumerate(shards)]
    return list(parts.values())


def _add(shards: Shards, hashes: list[dict[str, Any]], dtypes: list[dict[str, str]]) -> None:
    for rank, name, shard in shards:
        held = getattr(torch, dtypes[rank].get(name, dtype_name(shard)))
        hashes[rank].setdefault(name, hashlib.sha256()).update(raw_bytes(shard.to(held)))


def _named_once(sums: Sums, architecture: Architecture) -> Sums:
    """The engine may report a tied weight under the name of the output layer; the learner's is the embedding's."""
    if not architecture.tied:
        return sums
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    return {embedding if name == head else name: value for name, value in sums.items()}


def _difference(expected: list[Sums], found: list[Sums]) -> str:
    """One clause that says what differs, empty when nothing does."""
    for rank, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        where = f" on its tensor parallel rank {rank}" if len(expected) > 1 else ""
        for names, what in (
            (ours.keys() - theirs.keys(), "lacks"),
            (theirs.keys() - ours.keys(), "was never sent"),
            ({name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}, "differs in"),
        ):
            if names:
                return f"it {what} {sorted(names)[0]}{where} ({len(names)} of {len(ours)} tensors)"
    return ""
