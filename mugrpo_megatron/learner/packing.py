"""Packs an update's sequences into micro-batches of equal length, balanced over the data parallel ranks.

Every rank computes the same plan of the whole update from the lengths and takes its own share, without communication.
All micro-batches of an update have one length on all ranks, so pipeline stages exchange tensors of one shape.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mugrpo_megatron.learner.attention import Packing, make_packing
from mugrpo_megatron.learner.context import gathered_indices, local_rows
from mugrpo_megatron.learner.routing import Routing
from mugrpo_megatron.samples import Routes, Sample


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A sequence to train on. Its tokens from index `prompt` on have a loss; with a `mask`, those that it selects."""

    ids: np.ndarray
    """int [n]: token ids."""
    prompt: int
    """Number of leading tokens without a loss; at least 1."""
    routes: Routes | None = None
    """The experts to replay for every token except the last; with None the routers choose them."""
    mask: np.ndarray | None = None
    """bool [n - prompt]: the tokens after the prompt that have a loss; None if all have one."""
    support_ids: np.ndarray | None = None
    """int [trained, k]: ids that each trained token's softmax runs over, padded with -1; None for the vocabulary."""

    @property
    def trained(self) -> int:
        return len(self.ids) - self.prompt if self.mask is None else int(self.mask.sum())

    @property
    def trained_positions(self) -> np.ndarray:
        """int64 [trained]: positions of the tokens with a loss."""
        positions = np.arange(self.prompt, len(self.ids))
        return positions if self.mask is None else positions[self.mask]


@dataclass(frozen=True, slots=True)
class PackingPlan:
    micro_batches: list[list[list[int]]]
    """[data parallel rank][micro-batch] -> indices of sequences; all ranks have the same number of micro-batches."""
    length: int
    """Tokens of every micro-batch, padding included."""
    efficiency: float
    """Fraction of packed tokens that are not padding, over all ranks."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row: n sequences one after another, with T trained tokens in all.

    Under context parallelism `ids` and `positions` are this rank's part of the row. The n sequences are then those
    whose loss this rank computes, wherever their tokens are.
    """

    indices: list[int]
    """Indices of the n sequences in the update."""
    ids: torch.Tensor
    """int64 [1, length / cp]: token ids."""
    positions: torch.Tensor
    """int64 [1, length / cp]: the position of each token in its sequence, from 0."""
    packing: Packing
    rows: torch.Tensor
    """int64 [T]: the row whose hidden state predicts each trained token, after the context parallel gather."""
    targets: torch.Tensor
    """int64 [T]: the trained tokens."""
    lengths: torch.Tensor
    """int64 [n]: number of trained tokens of each sequence."""
    responses: torch.Tensor
    """int64 [n]: the same indices as `indices`, on the device."""
    routing: Routing | None = None
    """The experts that the routers replay or record; with None they choose, and nothing is recorded."""
    support_ids: torch.Tensor | None = None
    """int64 [T, k]: ids that each trained token's softmax runs over, padded with -1; None for the vocabulary."""


def sequence_of(sample: Sample, masked: bool = False) -> TokenSequence:
    """Make the sequence of a sample. Its trained tokens are the response or, if `masked`, those in the loss mask."""
    ids = np.concatenate([sample.prompt_ids, sample.response_ids])
    support_ids, mask = sample.support_ids, sample.loss_mask if masked else None
    support_ids = support_ids if support_ids is None or mask is None else support_ids[mask]
    return TokenSequence(ids, len(sample.prompt_ids), sample.routes, mask, support_ids)


def plan(lengths: Sequence[int], dp_size: int, budget: int, multiple: int = 1, count_multiple: int = 1) -> PackingPlan:
    """Distribute sequences of `lengths` tokens evenly over few micro-batches of at most `budget` tokens each.

    A budget below the longest sequence is raised to its length. Each sequence, longest first, goes into the emptiest
    micro-batch (Graham's LPT rule: at most 4/3 of the best possible length). The length of micro-batches is rounded up
    to a multiple of `multiple`, which sequence parallelism and fp8 need. Each rank's number of micro-batches is rounded
    up to a multiple of `count_multiple`, for the interleaved pipeline schedule and for a CPU rank that runs some at
    once. `lengths` must not be empty.
    """
    total, longest = sum(lengths), max(lengths)
    capacity = max(budget, longest)
    per_rank = _round_up(-(-total // (capacity * dp_size)), count_multiple)
    while True:
        bins, fullest = fill_bins(lengths, per_rank * dp_size)
        if fullest <= capacity or per_rank >= len(lengths):
            break
        per_rank += count_multiple
    length = _round_up(fullest, multiple)
    micro_batches = [[bins[micro * dp_size + rank] for micro in range(per_rank)] for rank in range(dp_size)]
    return PackingPlan(micro_batches, length, total / (length * per_rank * dp_size))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def fill_bins(lengths: Sequence[int], count: int) -> tuple[list[list[int]], int]:
    """Distribute `lengths` over `count` bins of about equal sums, the longest first and always into the emptiest bin;
    returns the indices in each bin, and the largest sum."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        filled, emptiest = heap[0]
        bins[emptiest].append(index)
        heapq.heapreplace(heap, (filled + lengths[index], emptiest))
    return [sorted(indices) for indices in bins], max(filled for filled, _ in heap)


def pack(
    sequences: Sequence[TokenSequence],
    indices: list[int],
    length: int,
    device: torch.device,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> MicroBatch:
    """Pack the sequences at `indices` into a row of `length` tokens, filled up with padding segments.

    No padding segment is longer than the longest sequence. Under context parallelism `length` is a multiple of 2
    `cp_size`, and the result has the ids and positions of the tokens that rank `cp_rank` holds, beside the targets of
    the complete responses whose loss this rank computes.
    """
    chosen = [sequences[i] for i in indices]
    lengths = np.array([len(s.ids) for s in chosen], dtype=np.int64)
    segments = np.concatenate([lengths, _padding_lengths(length - int(lengths.sum()), int(lengths.max(initial=1)))])
    offsets = np.concatenate([[0], np.cumsum(segments)])
    ids = np.zeros(length, dtype=np.int64)
    ids[: lengths.sum()] = np.concatenate([s.ids for s in chosen]) if chosen else 0
    positions = np.arange(length) - np.repeat(offsets[:-1], segments)
    # Under context parallelism each rank computes the loss of complete responses, not of the rows that it holds.
    local = fill_bins([s.trained for s in chosen], cp_size)[0][cp_rank]
    targets = np.concatenate([np.empty(0, dtype=np.int64), *(offsets[i] + chosen[i].trained_positions for i in local)])
    local_indices = np.array([indices[i] for i in local], dtype=np.int64)
    rows = local_rows(length, cp_rank, cp_size)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        indices=local_indices.tolist(),
        ids=on_device(ids[None, rows]),
        positions=on_device(positions[None, rows]),
        packing=make_packing(segments, device, cp_rank, cp_size),
        rows=on_device(gathered_indices(length, cp_size)[targets - 1]),
        targets=on_device(ids[targets]),
        lengths=on_device(np.array([chosen[i].trained for i in local], dtype=np.int64)),
        responses=on_device(local_indices),
        support_ids=_support_ids([chosen[i] for i in local], device),
    )


def _support_ids(sequences: list[TokenSequence], device: torch.device) -> torch.Tensor | None:
    """int64 [T, k]: the tokens that each trained token's softmax runs over, padded with -1; None for the vocabulary."""
    support_rows = [sequence.support_ids for sequence in sequences if sequence.support_ids is not None]
    if not support_rows:
        return None
    if len(support_rows) < len(sequences):
        raise ValueError(
            "some responses of an update have support ids and others have none: they were sampled with different "
            "rollout.top_k; sample the whole stage with one value"
        )
    width = max(rows.shape[1] for rows in support_rows)
    padded = [np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1) for rows in support_rows]
    return torch.from_numpy(np.concatenate(padded).astype(np.int64)).to(device)


def _padding_lengths(rest: int, longest: int) -> np.ndarray:
    """The lengths of padding segments of at most `longest` tokens each, `rest` tokens in total."""
    # One long padding segment would dominate the cost of attention, which is quadratic.
    count, remainder = divmod(rest, longest)
    return np.array([longest] * count + [remainder] * (remainder > 0), dtype=np.int64)
