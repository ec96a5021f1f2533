"""Core attention over packed sequences, on any device.

Megatron's local attention refuses packed sequences without CUDA. This module replaces it through the layer's
`ModuleSpec` and also applies the rotary embedding, each row at its own position, so nothing loops over sequences. CUDA
in half precision runs one variable-length flash attention. On CPU, and in float32, which flash attention does not
support, segments of similar length are padded into a few batched scaled-dot-product calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from mugrpo_megatron.learner.context import ContextSplit, attend, flash_attention, split_segments, takes_flash
from mugrpo_megatron.learner.operators import rotate, rotate_

_WASTE = 1.25
"""Largest number of rows of a padded bucket (`LengthBucket`), as a multiple of the tokens in it."""


@dataclass(frozen=True)
class LengthBucket:
    """Segments of similar length, padded to one length."""

    count: int
    length: int


@dataclass(frozen=True)
class Padding:
    """All segments of a packed micro-batch in a few buckets, with the indices that pad and unpad them."""

    buckets: list[LengthBucket]
    rows: torch.Tensor
    """int64 [slots]: the packed row that each slot (a row of the padded buckets) is filled from. Slots that only pad
    take their segment's first row."""
    slots: torch.Tensor
    """int64 [tokens]: the slot of each packed row, counted through all padded buckets."""


@dataclass
class Packing(PackedSeqParams):
    """The segments of a packed micro-batch, which cover all of its rows.

    `qkv_format` stays "sbhd": Megatron then keeps [tokens, 1, heads, dim], and `PackedAttention` handles segments.
    """

    qkv_format: str = "sbhd"
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    """cos and sin [tokens, 1, d / 2] of every row's rotary angles, which the model sets; None: nothing is rotated."""
    split: ContextSplit | None = None
    """This rank's rows under context parallelism; None without context parallelism."""
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """int [n], on the host: number of tokens in each segment."""

    @cached_property
    def padding(self) -> Padding:
        """The padding of the segments, computed by the first layer that asks for it; flash attention needs none."""
        return _make_padding(self.lengths, self.cu_seqlens_q.device)

    @cached_property
    def pre_rotated(self) -> Packing:
        """This packing without a rotation, for queries and keys that are already rotated."""
        return replace(self, rotation=None)


def make_packing(lengths: np.ndarray, device: torch.device, cp_rank: int = 0, cp_size: int = 1) -> Packing:
    """Describe consecutive segments of `lengths` int [n] tokens, all positive, for one context parallel rank."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    cu = torch.from_numpy(offsets.astype(np.int32)).to(device)
    longest = int(lengths.max())
    split = split_segments(offsets, cp_rank, cp_size, device) if cp_size > 1 else None
    return Packing(
        cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest, split=split, lengths=lengths
    )


def _make_padding(lengths: np.ndarray, device: torch.device) -> Padding:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    order = np.argsort(-lengths, kind="stable")
    slots = np.empty(offsets[-1], dtype=np.int64)
    buckets, packed_rows, base, start = [], [], 0, 0
    while start < len(order):
        longest = int(lengths[order[start]])
        tokens = np.cumsum(lengths[order[start:]])
        area = longest * np.arange(1, len(tokens) + 1)
        count = int(np.flatnonzero(area <= _WASTE * tokens)[-1]) + 1
        chosen = order[start : start + count]
        column = np.arange(longest)
        real = column < lengths[chosen, None]
        rows = offsets[chosen, None] + np.where(real, column, 0)
        slots[rows[real]] = base + np.flatnonzero(real)
        packed_rows.append(rows.reshape(-1))
        buckets.append(LengthBucket(count, longest))
        base, start = base + count * longest, start + count
    return Padding(
        buckets, torch.from_numpy(np.concatenate(packed_rows)).to(device), torch.from_numpy(slots).to(device)
    )


class _RotateAndPad(torch.autograd.Function):
    """Rotate query and key, and pad query, key and value [t, ., d] to [slots, all heads, d].

    Row i of the result is packed row `rows[i]`; the gradient of packed row j is read from slot `slots[j]` only. Slots
    that only pad copy a row too, but causality makes their gradient zero, so skipping them is exact. Both directions
    gather, because scatter-add is slow on CPU. The result is float32, because attention in bfloat16 is slow there too.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        ctx.heads, ctx.dtype, ctx.packing = (q.shape[1], k.shape[1], v.shape[1]), q.dtype, packing
        qkv = torch.cat([q, k, v], dim=1)
        if packing.rotation:
            rotate_(qkv[:, : q.shape[1] + k.shape[1]], *packing.rotation)
        return qkv.index_select(0, rows).float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0].index_select(0, ctx.packing.padding.slots).to(ctx.dtype)
        if ctx.packing.rotation:
            cos, sin = ctx.packing.rotation
            rotate_(grad[:, : ctx.heads[0] + ctx.heads[1]], cos, -sin)
        return *grad.split(ctx.heads, dim=1), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, sin, inverse=True), None, None


class Unpad(torch.autograd.Function):
    """Take the real rows out of padded buckets: [slots, heads, d] -> packed [t, heads, d]."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.padded = len(padded)
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slots,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.padded, *grads[0].shape[1:]).index_copy_(0, slots, grads[0]), None


class PackedAttention(torch.nn.Module):
    """Causal attention inside each segment of a packed micro-batch, with grouped-query heads and without dropout.

    Forward takes query [t, 1, hq, d], key and value [t, 1, hkv, d] in the parameters' dtype and a `Packing`, and
    returns [t, 1, hq * d].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> torch.Tensor:
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if packed_seq_params.split:
            query, key = rotate_packed(query, packed_seq_params), rotate_packed(key, packed_seq_params)
            out = attend(query, key, value, packed_seq_params.split, self.scale)
        elif takes_flash(query):
            query, key = rotate_packed(query, packed_seq_params), rotate_packed(key, packed_seq_params)
            cu, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            out = flash_attention(query, key, value, cu, cu, (longest, longest), self.scale)
        else:
            out = _bucketed(query, key, value, packed_seq_params, self.scale)
        return out.flatten(1).unsqueeze(1)


def rotate_packed(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Rotate x [t, heads, d], each row by the angles of its position; unchanged if `packing.rotation` is None."""
    return _Rotate.apply(x, *packing.rotation) if packing.rotation else x


def _bucketed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scale: float | None) -> torch.Tensor:
    heads, groups, padding = q.shape[1], k.shape[1], packing.padding
    padded = _RotateAndPad.apply(q, k, v, padding.rows, packing)
    outputs = []
    sizes = [bucket.count * bucket.length for bucket in padding.buckets]
    for bucket, rows in zip(padding.buckets, padded.split(sizes), strict=True):
        batch = rows.view(bucket.count, bucket.length, heads + 2 * groups, -1).transpose(1, 2)
        bq, bk, bv = batch.split([heads, groups, groups], dim=1)
        out = F.scaled_dot_product_attention(bq, bk, bv, is_causal=True, scale=scale, enable_gqa=heads != groups)
        outputs.append(out.transpose(1, 2).reshape(-1, heads, out.shape[-1]))
    return Unpad.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], padding.slots).to(q.dtype)
