"""Whether an engine holds the learner's weights: checksums of every tensor, compared on each leader."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.buckets import fill
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


Checksums = list[dict[str, str]]
"""For each tensor parallel rank of an engine: its parameter -> SHA-256 of the bytes."""


class SummedEngine(Protocol):
    """What the check asks of an engine; `rollout.engine.Engine` is one."""

    def checksums(self) -> Checksums:
        """The engine's own sums, over every parameter that it holds."""


class WeightMismatch(RuntimeError):
    """An engine's weights are not the learner's; names the tensors."""


def check(bridge: Bridge, engine: SummedEngine | None) -> int:
    """Compare every tensor of each leader's engine with the learner's, bitwise; returns how many were compared.

    Collective, and it takes a pass over all weights: meant for the first sync and for doubts. Returns 0 without a look
    where SGLang pads heads or experts with layouts of its own (`padded_on_cpu`). Raises WeightMismatch on every rank
    when a tensor of any engine differs, is missing, or was never filled by the learner.
    """
    if bridge.staging is not None and padded_on_cpu(bridge.architecture, bridge.engine_tensor):
        return 0
    expected = expected_checksums(bridge, summed=engine is not None)
    fault = "" if engine is None else _difference(expected, _named_once(engine.checksums(), bridge.architecture))
    faults: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for rank, found in enumerate(faults):
        if found:
            raise WeightMismatch(f"the engine that rank {rank} leads does not hold the learner's weights: {found}")
    return sum(len(names) for names in expected)


def expected_checksums(bridge: Bridge, summed: bool = True) -> Checksums:
    """What the engine's sums should be; ranks that lead no engine (`summed` false) take part in the gathering alone."""
    sums: list[dict[str, hashlib._Hash]] = [{} for _ in range(bridge.engine_tensor)]
    for number, bucket in enumerate(bridge.plan.buckets):
        flat = buffer(bridge, bucket, number)
        fill(bucket, bridge.held, bridge.architecture, flat)
        if not summed:
            continue
        for piece in bucket.pieces:
            for slot in piece.slots:
                # The plan keeps q, k, v and gate, up and the experts in order: fused bytes are theirs in sequence.
                name, tensor = engine_name(slot.name), slot.view(flat)
                shards = engine_shards(piece.entry, slot.name, tensor, bridge.engine_tensor, bridge.architecture)
                for rank, shard in enumerate(shards):
                    raw = shard.contiguous().view(-1).view(torch.uint8).cpu().numpy()
                    sums[rank].setdefault(name, hashlib.sha256()).update(raw.data)
    return [{name: found.hexdigest() for name, found in by_name.items()} for by_name in sums]


def _named_once(found: Checksums, architecture: Architecture) -> Checksums:
    """The engine reports a tied weight under one of its two names; the learner's is the embedding's."""
    if not architecture.tied:
        return found
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    return [{embedding if name == head else name: value for name, value in sums.items()} for sums in found]


def _difference(expected: Checksums, found: Checksums) -> str:
    """One clause that says what differs, empty when nothing does."""
    for rank, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        where = f"on its tensor parallel rank {rank}" if len(expected) > 1 else ""
        for names, what in (
            (ours.keys() - theirs.keys(), "lacks"),
            (theirs.keys() - ours.keys(), "was never sent"),
            ({name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}, "differs in"),
        ):
            if names:
                first = sorted(names)[0]
                return f"it {what} {first} {where} ({len(names)} of {len(ours)} tensors)".replace("  ", " ")
    return ""
