"""Plans and fills buckets: buffers of many tensors on their way from the learner to engines or to a checkpoint.

A plan is the same on every rank, and its buckets may be filled any number of times.

For fp8 engines a bucket is quantised in blocks, in the format of fp8 checkpoints: each linear layer has a `weight` in
float8_e4m3fn and a `weight_scale_inv`, the float32 factor of each block of 128 x 128. SGLang 0.5.15 loads such a bucket
into a running engine that was started on a config with `weight_block_size` (`srt/layers/quantization/fp8.py`). It
cannot load a bucket into an engine whose weights it has quantised itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, Protocol, TypeGuard

import torch
import torch.distributed as dist

from mugrpo_megatron.megatron_compat import parallel_state
from mugrpo_megatron.recipe.systems import BLOCK
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.safetensors_dir import TensorSpec
from mugrpo_megatron.weights.table import (
    Entry,
    entries,
    local_parameters,
    split_to_hf,
    tensor_group,
    unshard,
    whole_shape,
)

# SGLang reads slices of the bucket's bytes as views in the tensors' types (srt/weight_sync/tensor_bucket.py), for which
# torch requires that an offset is a multiple of the type's size.
ALIGNMENT = 16
"""Tensors start at multiples of this many bytes in a bucket."""
SAVE_BUCKET_BYTES = 256 * 1024**2
"""Largest bucket of a save; `recipe.systems.sync_bucket_bytes` limits a sync."""
LARGEST = 448.0
"""Largest finite value of float8_e4m3fn."""
STRIP = 1 << 24
"""Approximate number of a weight's values that are converted to float32 at a time while it is quantised."""
QUANTISED = re.compile(r"\.((q|k|v|o|gate|up|down)_proj|experts\.\d+\.w[123])\.weight$")
"""Hugging Face names of the weights that an fp8 engine multiplies in fp8."""

Owner = tuple[int, int | None]
"""The ranks that hold a parameter: (pipeline stage, expert parallel rank, or None for parameters outside the
experts)."""


@dataclass(frozen=True)
class Slot(TensorSpec):
    """A Hugging Face tensor and its offset in its bucket."""

    start: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of the bucket's uint8 buffer `flat`."""
        return flat[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)


class Run(NamedTuple):
    """A run of elements that is contiguous both in a Megatron parameter and in its bucket."""

    source: int
    """Index of the first element in the unsharded parameter, in row-major order."""
    elements: int
    start: int
    """Offset in the bucket, in bytes."""


@dataclass(frozen=True)
class ParameterSlots:
    """A Megatron parameter and the slots that it fills."""

    entry: Entry
    slots: tuple[Slot, ...]
    runs: tuple[Run, ...] = ()
    """The runs that fill the slots; none in a quantised bucket, which is made from the unquantised one."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together; the ranks of one `Owner` hold all of them."""

    owner: Owner
    parameters: tuple[ParameterSlots, ...]
    bytes: int

    @property
    def slots(self) -> Iterator[Slot]:
        return (slot for parameter in self.parameters for slot in parameter.slots)


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of the model, in the order in which every rank fills them."""

    buckets: tuple[Bucket, ...]

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def largest(self) -> int:
        return max(bucket.bytes for bucket in self.buckets)


def build_plan(chunks: Sequence[torch.nn.Module], architecture: Architecture, bucket_bytes: int) -> BucketPlan:
    """Plan buckets of at most `bucket_bytes`; a parameter larger than that gets a bucket of its own. Collective.

    Raises RuntimeError if the ranks have planned different buckets, which happens only if their models differ.
    """
    owners = _owners({entry.megatron: parameter.dtype for entry, parameter in local_parameters(chunks, architecture)})
    plan = BucketPlan(tuple(pack_parameters(owners, architecture, bucket_bytes)))
    # Filling a bucket is collective, so ranks that disagree about the next one would wait for each other forever.
    summary = [[slot.name for slot in bucket.slots] for bucket in plan.buckets]
    summaries: list[list[list[str]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(summaries, summary)
    for rank, other in enumerate(summaries):
        if other != summary:
            raise RuntimeError(
                f"rank {dist.get_rank()} and rank {rank} plan different buckets: their models differ; give every rank "
                "the same model directory and recipe"
            )
    return plan


def _owners(local: Mapping[str, torch.dtype]) -> dict[str, tuple[Owner, torch.dtype]]:
    """Owner and type of every parameter of the whole model, from each rank's `local` ones. Collective."""
    in_pp_stage: dict[str, tuple[int | None, torch.dtype]] = {}
    for rank, names in enumerate(_all_gather(local, parallel_state.get_expert_model_parallel_group())):
        for name, dtype in names.items():
            in_pp_stage[name] = (rank if "local_experts" in name else None, dtype)
    owners: dict[str, tuple[Owner, torch.dtype]] = {}
    for pp_stage, names in enumerate(_all_gather(in_pp_stage, parallel_state.get_pipeline_model_parallel_group())):
        for name, (rank, dtype) in names.items():
            # A tied embedding is on the first and the last stage; the first one sends it.
            owners.setdefault(name, ((pp_stage, rank), dtype))
    return owners


def _all_gather(item: Mapping, group: dist.ProcessGroup) -> list[Mapping]:
    gathered: list[Mapping] = [{}] * group.size()
    dist.all_gather_object(gathered, item, group=group)
    return gathered


def pack_parameters(
    owners: Mapping[str, tuple[Owner, torch.dtype]], architecture: Architecture, bucket_bytes: int
) -> Iterator[Bucket]:
    """Put the parameters into buckets, owner after owner; a bucket ends where the next parameter has another owner or
    does not fit."""
    table = entries(architecture)
    owner_order = {owner: number for number, owner in enumerate(sorted({o for o, _ in owners.values()}, key=_by_rank))}

    def order(name: str) -> tuple[int, bool]:
        owner, dtype = owners[name]
        _, size = _slots(table[name], architecture, dtype, 0)
        # Of each owner, parameters larger than a bucket come last: they are filled while the engine loads the others.
        return owner_order[owner], size > bucket_bytes

    parameters: list[ParameterSlots] = []
    used = 0
    current: Owner | None = None
    for name in sorted(table, key=order):
        owner, dtype = owners[name]
        slots, end = _slots(table[name], architecture, dtype, used)
        if parameters and (owner != current or end > bucket_bytes):
            assert current is not None
            yield Bucket(current, tuple(parameters), used)
            parameters = []
            slots, end = _slots(table[name], architecture, dtype, 0)
        parameters.append(ParameterSlots(table[name], slots, tuple(_runs(table[name], slots, architecture))))
        current, used = owner, end
    assert current is not None
    yield Bucket(current, tuple(parameters), used)


def _by_rank(owner: Owner) -> tuple[int, int]:
    return owner[0], -1 if owner[1] is None else owner[1]


def _slots(entry: Entry, architecture: Architecture, dtype: torch.dtype, start: int) -> tuple[tuple[Slot, ...], int]:
    """The slots of a parameter's tensors if the first is at the bucket's offset `start`, and the offset after them."""
    slots = []
    for name, shape in zip(entry.hf, entry.hf_shapes(architecture), strict=True):
        slot = Slot(name, shape, dtype, start)
        slots.append(slot)
        start += _aligned(slot.bytes)
    return tuple(slots), start


def _runs(entry: Entry, slots: Sequence[Slot], architecture: Architecture) -> Iterator[Run]:
    """The runs that copy an unsharded parameter into its slots.

    Each of q, k and v has a run for each group of heads; queries with gates have two runs for each head.
    """
    parameter = torch.empty(whole_shape(entry, architecture), dtype=slots[0].dtype, device="meta")
    for slot, tensor in zip(slots, split_to_hf(entry, parameter, architecture), strict=True):
        start = slot.start
        for part in _contiguous(tensor):
            yield Run(int(part.storage_offset()), part.numel(), start)
            start += part.nbytes


def _contiguous(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The largest contiguous parts of a view, in row-major order."""
    if tensor.is_contiguous():
        yield tensor
    else:
        for part in tensor.unbind():
            yield from _contiguous(part)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def planned_tensors(
    plan: BucketPlan, chunks: Sequence[torch.nn.Module], architecture: Architecture
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, unsharded tensor) of the learner's weights as a Hugging Face checkpoint has them, on every rank.

    Collective: every rank must exhaust the iterator, or the others wait for it. The tensors are views of a bucket's
    buffer, which is freed with the last of them. Vocabulary padding is cut off; a tied output layer has no tensor.
    """
    shards = local_shards(chunks, architecture)
    device = next(iter(shards.values())).device
    for bucket in plan.buckets:
        flat = torch.empty(bucket.bytes, dtype=torch.uint8, device=device)
        fill_bucket(bucket, shards, architecture, flat)
        for slot in bucket.slots:
            yield slot.name, slot.view(flat)


def local_shards(chunks: Sequence[torch.nn.Module], architecture: Architecture) -> dict[str, torch.Tensor]:
    """This rank's shards of parameters, by name in the whole model. They are not copies: their values stay current."""
    shards: dict[str, torch.Tensor] = {}
    for entry, parameter in local_parameters(chunks, architecture):
        shards.setdefault(entry.megatron, parameter)
    return shards


@torch.no_grad()
def fill_bucket(
    bucket: Bucket, shards: Mapping[str, torch.Tensor], architecture: Architecture, flat: torch.Tensor
) -> None:
    """Fill `flat` (uint8, at least the bucket's bytes) with the bucket's tensors on every rank; collective.

    Parameters that every tensor parallel rank holds whole are copied in one call for each type: on an H200, a call for
    each of 338 tensors took 10 to 20 ms in all, and copying the bytes takes 2 ms. The other parameters are gathered by
    the owner's tensor parallel ranks or merged with their adapter, one after the other, so that besides `flat` one
    unsharded parameter exists at a time. Then the bucket is broadcast to the other expert ranks and pipeline stages.
    """
    flat = flat[: bucket.bytes]
    pp_stage, expert_rank = bucket.owner
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    if pp_group.rank() == pp_stage:
        experts = parallel_state.get_expert_model_parallel_group()
        if expert_rank is None or experts.rank() == expert_rank:
            _fill_by_owner(bucket, shards, architecture, flat)
        if expert_rank is not None and experts.size() > 1:
            dist.broadcast(flat, group=experts, group_src=expert_rank)
    # Every rank gets every bucket, because an engine has all layers and reads them from its own devices' memory.
    if pp_group.size() > 1:
        dist.broadcast(flat, group=pp_group, group_src=pp_stage)


def _fill_by_owner(
    bucket: Bucket, shards: Mapping[str, torch.Tensor], architecture: Architecture, flat: torch.Tensor
) -> None:
    """Fill `flat` with the bucket's tensors, on the tensor parallel ranks of its owner. Collective over these."""
    in_place: dict[torch.dtype, list[ParameterSlots]] = {}
    for parameter in bucket.parameters:
        weight = shards[parameter.entry.megatron]
        if _is_whole(parameter.entry) and not has_adapter(weight):
            in_place.setdefault(weight.dtype, []).append(parameter)
            continue
        unsharded = _gather(parameter.entry, with_adapter(weight))
        tensors = split_to_hf(parameter.entry, unsharded, architecture)
        for slot, tensor in zip(parameter.slots, tensors, strict=True):
            # The slot is viewed in the tensor's shape: q, k and v are views with gaps, and reshaping these would be a
            # second copy.
            slot.view(flat).view(tensor.shape).copy_(tensor)
    for dtype, parameters in in_place.items():
        _copy_runs(parameters, shards, flat.view(dtype))


def _copy_runs(parameters: Sequence[ParameterSlots], shards: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
    """Copy whole parameters of one type into `flat`, the bucket as a vector of that type."""
    sources, targets = [], []
    for parameter in parameters:
        # Views are made for each fill: a parameter's memory may be replaced, and a cached view would keep the old one.
        values = shards[parameter.entry.megatron].view(-1)
        for source, elements, start in parameter.runs:
            sources.append(values.narrow(0, source, elements))
            targets.append(flat.narrow(0, start // flat.itemsize, elements))
    # For contiguous copies of one type, CUDA does about a hundred in a launch
    # (ATen/native/cuda/ForeachBinaryOpList.cu).
    torch._foreach_copy_(targets, sources)


class MergedWeight(Protocol):
    """A frozen weight that an adapter changes (`learner.model.Adapters`)."""

    def merged(self) -> torch.Tensor:
        """This rank's shard with the adapter merged into it."""


def has_adapter(weight: object) -> TypeGuard[MergedWeight]:
    """Whether the weight has an adapter."""
    # Not `isinstance(weight, MergedWeight)`: that took half of a fill's time, because MergedWeight is a Protocol.
    return hasattr(weight, "merged")


def with_adapter(weight: torch.Tensor) -> torch.Tensor:
    """The weight, with its adapter merged into it if it has one."""
    return weight.merged() if has_adapter(weight) else weight


def _is_whole(entry: Entry) -> bool:
    """Whether every tensor parallel rank holds the whole parameter."""
    return entry.row.split == "none" or tensor_group(entry).size() == 1


def _gather(entry: Entry, local: torch.Tensor) -> torch.Tensor:
    """The unsharded parameter, on every rank of its tensor parallel group."""
    if _is_whole(entry):
        return local
    group = tensor_group(entry)
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return unshard(entry, shards)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `weight` [N, K] to fp8, with a scale for each block of 128 x 128 values.

    Returns float8_e4m3fn [N, K] and float32 [ceil(N / 128), ceil(K / 128)]; a value times its block's scale is near the
    weight's. The scale maps a block's largest value to fp8's largest; a block of zeros has scale 1. The error of a
    value is at most 1/16 of it, or 2^-10 of its block's scale if that is more. A block with a value that is not finite
    becomes nan.
    """
    rows, columns = weight.shape
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    shape = -(-rows // BLOCK), -(-columns // BLOCK)
    scales = torch.empty(shape, dtype=torch.float32, device=weight.device)
    strip = max(1, STRIP // (BLOCK * shape[1] * BLOCK))
    for first in range(0, shape[0], strip):
        values = weight[first * BLOCK : (first + strip) * BLOCK].float()
        missing = -len(values) % BLOCK, -columns % BLOCK
        blocks = torch.nn.functional.pad(values, (0, missing[1], 0, missing[0]))
        blocks = blocks.view(-1, BLOCK, shape[1], BLOCK)
        scale = blocks.abs().amax((1, 3)) / LARGEST
        scale = torch.where(scale == 0, 1.0, scale)
        # torch casts values above 448 to nan, because e4m3fn has no infinity, and a scale that was rounded down may put
        # the block's largest value above 448.
        scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).view(-1, shape[1] * BLOCK)
        rows_here = slice(first * BLOCK, first * BLOCK + len(values))
        quantised[rows_here] = scaled[: len(values), :columns].to(torch.float8_e4m3fn)
        scales[first : first + len(scale)] = scale
    return quantised, scales


def quantised_bucket(bucket: Bucket) -> Bucket:
    """The bucket that an fp8 engine loads: the same tensors in order, each quantised one followed by its scales."""
    start = 0
    parameters = []
    for parameter in bucket.parameters:
        slots = []
        for slot in chain.from_iterable(map(_quantised_slots, parameter.slots)):
            slots.append(replace(slot, start=start))
            start += _aligned(slot.bytes)
        parameters.append(ParameterSlots(parameter.entry, tuple(slots)))
    return Bucket(bucket.owner, tuple(parameters), start)


def quantise_bucket(bucket: Bucket, flat: torch.Tensor, quantised: Bucket) -> torch.Tensor:
    """Quantise the bucket whose bytes are `flat`; `quantised` is its `quantised_bucket`.

    Returns the bytes of `quantised`, uint8 on the device of `flat`.
    """
    out = torch.empty(quantised.bytes, dtype=torch.uint8, device=flat.device)
    slots = iter(quantised.slots)
    for slot in bucket.slots:
        values = quantise(slot.view(flat)) if QUANTISED.search(slot.name) else (slot.view(flat),)
        for value in values:
            next(slots).view(out).copy_(value)
    return out


def _quantised_slots(slot: Slot) -> tuple[Slot, ...]:
    """The slots of a tensor in an fp8 engine's bucket; the caller sets their `start`."""
    if not QUANTISED.search(slot.name):
        return (slot,)
    rows, columns = (math.ceil(size / BLOCK) for size in slot.shape)
    return (
        replace(slot, dtype=torch.float8_e4m3fn),
        Slot(f"{slot.name}_scale_inv", (rows, columns), torch.float32, 0),
    )
