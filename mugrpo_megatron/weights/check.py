"""Compares the engines' weights with the learner's, by checksums of the tensors as SGLang shards and fuses them."""

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
from mugrpo_megatron.files.tensors import TensorChecksums, dtype_name, raw_bytes
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.buckets import Bucket
from mugrpo_megatron.weights.sync import WeightSync, fill_for_engines
from mugrpo_megatron.weights.table import DIMENSION, Entry

VOCAB_MULTIPLE = 64
"""SGLang pads its vocabulary with zero rows to a multiple of this."""

FUSED = (
    (re.compile(r"\.experts\.\d+\.(?:gate_proj|up_proj|w1|w3)\.weight(|_scale_inv)$"), r".experts.w13_weight\1"),
    (re.compile(r"\.experts\.\d+\.(?:down_proj|w2)\.weight(|_scale_inv)$"), r".experts.w2_weight\1"),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
COMPRESSED = (re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\."), ".fused_qkv_a_proj_with_mqa.")
"""Hugging Face names of the projections that SGLang fuses in latent attention, and the fused name. It fuses these two
where queries have a latent, and no others."""
HYBRID = (
    (re.compile(r"\.self_attn\."), "."),
    (re.compile(r"\.in_proj_(qkv|z)\."), ".in_proj_qkvz."),
    (re.compile(r"\.in_proj_(b|a)\."), ".in_proj_ba."),
)
"""Hugging Face names of gated delta networks and of the attention beside them -> the engine's."""


class SummedEngine(Protocol):
    """An engine that returns checksums of its weights: the part of `engine.client.Engine` that is needed here."""

    def checksums(self) -> list[TensorChecksums]:
        """Checksums of the parameters of each tensor parallel rank."""


class WeightMismatch(TrainingFailure):
    """Raised when an engine's weights differ from the learner's; the message names a tensor."""


def compare_weights(weight_sync: WeightSync, engine: SummedEngine | None) -> int:
    """Compare every tensor of each leader's engine with the learner's, bitwise; returns the number of tensors compared.

    That number is of this rank's `engine`, over all of its tensor parallel ranks.

    The tensors of an fp8 engine are compared with the learner's quantised tensors and their scales.

    Collective, and fills every bucket once; `engine` is None on ranks that do not lead one. If the engine has a tensor
    in another type, the learner's is converted to it first. Returns 0 if `engine` is None. If there is an
    `uncheckable_reason`, nothing is compared, and every rank gets 0.

    Raises WeightMismatch on every rank when a tensor of any engine differs, is missing, or was never sent by the
    learner; EngineFailure when this rank's engine fails, after this rank has done its part for the others.
    """
    if uncheckable_reason(weight_sync):
        return 0
    engine_sums: list[TensorChecksums] = []
    failure: EngineFailure | None = None
    if engine is not None:
        try:
            engine_sums = [_without_tied_name(sums, weight_sync.architecture) for sums in engine.checksums()]
        except EngineFailure as error:
            failure = error
    expected = expected_checksums(weight_sync, engine_sums)
    faults: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(faults, _difference(expected, engine_sums))
    for rank, fault in enumerate(faults):
        if fault:
            where = f"the engine that rank {rank} leads" if len(faults) > 1 else "the engine"
            raise WeightMismatch(
                f"{where} does not hold the learner's weights: {fault}. It would sample from a different policy. "
                "Look for the error with `mugrpo convert verify`, which checks the weight table; "
                'engine.check_weights = "never" skips this comparison'
            )
    if failure:
        raise failure
    return sum(len(names) for names in expected)


def uncheckable_reason(weight_sync: WeightSync) -> str:
    """A sentence that says why the engines' weights cannot be compared with the learner's; empty if they can."""
    if weight_sync.staging is not None and padded_on_cpu(weight_sync.architecture, weight_sync.engine_tensor):
        return (
            f"on CPU SGLang pads this model's heads or experts for engine.tensor = {weight_sync.engine_tensor}, in a "
            "layout that this check does not know"
        )
    return ""


def padded_on_cpu(architecture: Architecture, size: int) -> bool:
    """Whether SGLang pads heads or experts of this model to divide them over `size` ranks of an engine on CPU.

    SGLang's rule is in srt/configs/update_config.py.
    """
    uneven_heads = architecture.transformer["num_query_groups"] % size != 0
    names = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size") if architecture.experts else ()
    widths = [architecture.transformer.get(name) or 0 for name in names]
    return uneven_heads or any(width % (32 * size) for width in widths)


def expected_checksums(weight_sync: WeightSync, engine_sums: list[TensorChecksums]) -> list[TensorChecksums]:
    """Compute the checksums that this rank's engine should have; those that it has are `engine_sums`. Collective.

    The learner's tensors are converted to the types in `engine_sums` first. Returns an entry for each tensor parallel
    rank of the engine; none on ranks without `engine_sums`.
    """
    hashes: list[dict[str, hashlib._Hash]] = [{} for _ in engine_sums]
    dtypes: list[dict[str, str]] = [{name: dtype for name, (dtype, _) in sums.items()} for sums in engine_sums]
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for number in range(len(weight_sync.plan.buckets)):
            bucket, flat = fill_for_engines(weight_sync, number)
            if engine_sums:
                list(pool.map(lambda shards: _add(shards, hashes, dtypes), _by_name(bucket, flat, weight_sync)))
    return [
        {name: (dtypes[rank].get(name, ""), total.hexdigest()) for name, total in by_name.items()}
        for rank, by_name in enumerate(hashes)
    ]


Shards = list[tuple[int, str, torch.Tensor]]
"""(tensor parallel rank of the engine, its name of a parameter, a Hugging Face tensor's part of that rank's shard)"""


def _by_name(bucket: Bucket, flat: torch.Tensor, weight_sync: WeightSync) -> list[Shards]:
    """For each parameter of the engine in the bucket, the shards of the tensors that it consists of, in order."""
    # A fused parameter's bytes are those of its tensors, one after the other, in the order in which the plan has them:
    # q, k, v; gate, up; expert by expert.
    by_name: defaultdict[str, Shards] = defaultdict(list)
    architecture = weight_sync.architecture
    for parameter in bucket.parameters:
        for slot in parameter.slots:
            name = engine_name(slot.name, architecture)
            tensor = slot.view(flat)
            shards = engine_shards(
                parameter.entry, slot.name, tensor, weight_sync.engine_tensor, weight_sync.architecture
            )
            by_name[name] += [(rank, name, shard) for rank, shard in enumerate(shards)]
    return list(by_name.values())


def _add(shards: Shards, hashes: list[dict[str, Any]], dtypes: list[dict[str, str]]) -> None:
    for rank, name, shard in shards:
        dtype = getattr(torch, dtypes[rank].get(name, dtype_name(shard)))
        hashes[rank].setdefault(name, hashlib.sha256()).update(raw_bytes(shard.to(dtype)))


def _without_tied_name(sums: TensorChecksums, architecture: Architecture) -> TensorChecksums:
    """The checksums with a tied weight under the embedding's name; the engine may report it as the output layer's."""
    if not architecture.tied:
        return sums
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    return {embedding if name == head else name: value for name, value in sums.items()}


def _difference(expected: list[TensorChecksums], engine_sums: list[TensorChecksums]) -> str:
    """A phrase about a tensor that the engine lacks, was never sent, or has with another checksum; else empty."""
    for rank, (ours, theirs) in enumerate(zip(expected, engine_sums, strict=True)):
        where = f" on its tensor parallel rank {rank}" if len(expected) > 1 else ""
        for names, what in (
            (ours.keys() - theirs.keys(), "lacks"),
            (theirs.keys() - ours.keys(), "was never sent"),
            ({name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}, "differs in"),
        ):
            if names:
                return f"it {what} {sorted(names)[0]}{where} ({len(names)} of {len(ours)} tensors)"
    return ""


def engine_name(hf_name: str, architecture: Architecture) -> str:
    """The engine's name of the parameter that holds a Hugging Face tensor, alone or fused with others."""
    latent = architecture.latent
    if latent and ".self_attn." in hf_name:
        return COMPRESSED[0].sub(COMPRESSED[1], hf_name) if latent.query else hf_name
    if architecture.delta:
        for pattern, replacement in HYBRID:
            hf_name = pattern.sub(replacement, hf_name)
    for pattern, replacement in FUSED:
        if pattern.search(hf_name):
            return pattern.sub(replacement, hf_name)
    return hf_name


def engine_shards(
    entry: Entry, name: str, tensor: torch.Tensor, size: int, architecture: Architecture
) -> Iterator[torch.Tensor]:
    """Yield the shard of a Hugging Face tensor on each of the engine's `size` tensor parallel ranks, in rank order."""
    for rank in range(size):
        if entry.row.form == "vocab":
            yield _vocab_shard(tensor, size, rank)
        elif entry.row.split == "none":
            yield tensor
        elif name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
            sections = tensor.split([rows for _, rows in entry.row.sections[:3]])
            yield torch.cat([section.chunk(size)[rank] for section in sections])
        elif entry.row.form in ("qkv", "qkv_gated") and ".q_proj." not in name:
            # With fewer key/value heads than ranks, several ranks hold the same head.
            parts = min(size, architecture.transformer["num_query_groups"])
            yield tensor.chunk(parts, dim=0)[rank * parts // size]
        else:
            yield tensor.chunk(size, dim=DIMENSION[entry.row.split])[rank]


def _vocab_shard(tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    rows = -(-len(tensor) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // size
    rows_of_rank = tensor[rank * rows : (rank + 1) * rows]
    return torch.cat([rows_of_rank, rows_of_rank.new_zeros(rows - len(rows_of_rank), *rows_of_rank.shape[1:])])
