"""fp8 weights for the engines: the learner's, quantised in blocks as fp8 checkpoints hold them.

SGLang 0.5.15 loads them into a running engine if it was started on a config with `weight_block_size`: each linear layer
has a `weight` in float8_e4m3fn and a `weight_scale_inv`, the float32 factor of each block of 128 x 128
(`srt/layers/quantization/fp8.py`). Weights that it quantises itself it cannot load again.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch

from mugrpo_megatron.recipe.systems import BLOCK
from mugrpo_megatron.weights.buckets import ALIGNMENT, Bucket, Piece, Slot

LARGEST = 448.0
"""The largest finite value of float8_e4m3fn, which has no infinity: the cast makes larger ones nan."""
STRIP = 1 << 24
"""About as many values of a weight are in float32 at a time."""
QUANTISED = re.compile(r"\.((q|k|v|o|gate|up|down)_proj|experts\.\d+\.w[123])\.weight$")
"""Hugging Face names of the weights that an fp8 engine multiplies in fp8."""


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [N, K] and float32 [ceil(N / 128), ceil(K / 128)] whose product by blocks is near `weight` [N, K].

    The scale puts a block's largest value on the largest of fp8, so nothing saturates; an empty block has scale 1.
    A value is off by at most 1/16 of itself, or by 2^-10 of its block's scale if that is more. A block with a value
    that is not finite becomes nan.
    """
    rows, columns = weight.shape
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    shape = -(-rows // BLOCK), -(-columns // BLOCK)
    scales = torch.empty(shape, dtype=torch.float32, device=weight.device)
    strip = max(1, STRIP // (BLOCK * shape[1] * BLOCK))
    for first in range(0, shape[0], strip):
        part = weight[first * BLOCK : (first + strip) * BLOCK].float()
        short = -len(part) % BLOCK, -columns % BLOCK
        blocks = torch.nn.functional.pad(part, (0, short[1], 0, short[0]))
        blocks = blocks.view(-1, BLOCK, shape[1], BLOCK)
        scale = blocks.abs().amax((1, 3)) / LARGEST
        scale = torch.where(scale == 0, 1.0, scale)
        scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).view(-1, shape[1] * BLOCK)
        quantised[first * BLOCK : first * BLOCK + len(part)] = scaled[: len(part), :columns].to(torch.float8_e4m3fn)
        scales[first : first + len(scale)] = scale
    return quantised, scales


def quantised_bucket(bucket: Bucket) -> Bucket:
    """The bucket as an fp8 engine loads it: the same tensors in order, each quantised one followed by its scales."""
    start = 0
    pieces = []
    for piece in bucket.pieces:
        slots = []
        for slot in piece.slots:
            for one in _slots(slot):
                slots.append(replace(one, start=start))
                start += -(-one.bytes // ALIGNMENT) * ALIGNMENT
        pieces.append(Piece(piece.entry, tuple(slots)))
    return Bucket(bucket.owner, tuple(pieces), start)


def quantise_bucket(bucket: Bucket, flat: torch.Tensor, quantised: Bucket) -> torch.Tensor:
    """The bytes of `quantised_bucket(bucket)`, from the bucket's own in `flat`; uint8 on the same device."""
    out = torch.empty(quantised.bytes, dtype=torch.uint8, device=flat.device)
    theirs = iter(quantised.slots)
    for slot in bucket.slots:
        values = quantise(slot.view(flat)) if QUANTISED.search(slot.name) else (slot.view(flat),)
        for value in values:
            next(theirs).view(out).copy_(value)
    return out


def _slots(slot: Slot) -> tuple[Slot, ...]:
    """What becomes of a tensor; `start` is not set."""
    if not QUANTISED.search(slot.name):
        return (slot,)
    rows, columns = (math.ceil(size / BLOCK) for size in slot.shape)
    return (
        replace(slot, dtype=torch.float8_e4m3fn),
        Slot(f"{slot.name}_scale_inv", (rows, columns), torch.float32, 0),
    )
