"""Pack an update's sequences into micro-batches of equal length, balanced over the data parallel ranks.

Every rank computes the same plan for the whole update from the lengths and takes its own share, without communication.
All micro-batches of an update have one length on all ranks, so pipeline stages exchange tensors of one shape.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mugrpo_megatron.learner.attention import Packing, make_packing
from mugrpo_megatron.learner.context import gathered_places, local_rows
from mugrpo_megatron.learner.routing import Routing
from mugrpo_megatron.samples import Routes, Sample


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A sequence to train on; the loss covers the tokens from `prompt` on."""

    ids: np.ndarray
    """int [n]"""
    prompt: int
    """Number of leading tokens without a loss; at least 1."""
    routes: Routes | None = None
    """The experts that every token but the last is sent to; None to let the routers choose."""
    mask: np.ndarray | None = None
    """bool [n - prompt]: which of the other tokens have a loss; None for all."""
    support_ids: np.ndarray | None = None
    """int [trained, k]: the tokens that the softmax of each trained token runs over, -1 where fewer; None for all."""

    @property
    def trained(self) -> int:
        return len(self.ids) - self.prompt if self.mask is None else int(self.mask.sum())

    @property
    def places(self) -> np.ndarray:
        """int64 [trained]: where the tokens with a loss are."""
        places = np.arange(self.prompt, len(self.ids))
        return places if self.mask is None else places[self.mask]


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Which sequences share a micro-batch."""

    shares: list[list[list[int]]]
    """[data parallel rank][micro-batch] -> indices of sequences; all ranks have the same number of micro-batches."""
    length: int
    """Tokens of every micro-batch, padding included."""
    efficiency: float
    """Share of all packed tokens that are not padding, over all ranks."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row, with its T trained tokens of n sequences in the order of `indices`.

    Under context parallelism `ids` and `positions` are this rank's rows of it, and the trained tokens are those of the
    sequences whose loss this rank computes.
    """

    indices: list[int]
    """Indices of the n sequences in the update."""
    ids: torch.Tensor
    """int64 [1, length / cp]"""
    positions: torch.Tensor
    """int64 [1, length / cp]: from 0 in every sequence."""
    packing: Packing
    rows: torch.Tensor
    """int64 [T]: row (of the gathered rows of all ranks) whose hidden state predicts each trained token."""
    targets: torch.Tensor
    """int64 [T]: the trained tokens."""
    lengths: torch.Tensor
    """int64 [n]: trained tokens of each sequence."""
    responses: torch.Tensor
    """int64 [n]: `indices`, on the device."""
    routing: Routing | None = None
    """What the routers are told; None lets them choose."""
    support_ids: torch.Tensor | None = None
    """int64 [T, k]: the tokens that the softmax at each trained token runs over, -1 where fewer; None for all."""


def sequence_of(sample: Sample, masked: bool = False) -> TokenSequence:
    """A sample as a sequence whose trained tokens are the response, or its loss mask's part of it if `masked`."""
    ids = np.concatenate([sample.prompt_ids, sample.response_ids])
    support_ids, mask = sample.support_ids, sample.loss_mask if masked else None
    support_ids = support_ids if support_ids is None or mask is None else support_ids[mask]
    return TokenSequence(ids, len(sample.prompt_ids), sample.routes, mask, support_ids)


def plan(lengths: Sequence[int], dp_size: int, budget: int, multiple: int = 1, count_multiple: int = 1) -> PackingPlan:
    """Distribute sequences of `lengths` tokens evenly over as few micro-batches of `budget` tokens as possible.

    A budget below the longest sequence is raised to it, since memory has to hold that one anyway. Each sequence,
    longest first, goes into the emptiest micro-batch (Graham's LPT rule: at most 4/3 of the best possible length). The
    length is rounded up to `multiple` (what sequence parallelism divides), each rank's number of micro-batches to
    `count_multiple` (what the interleaved pipeline schedule requires). `lengths` must not be empty.
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
    shares = [[bins[micro * dp_size + rank] for micro in range(per_rank)] for rank in range(dp_size)]
    return PackingPlan(shares, length, total / (length * per_rank * dp_size))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def fill_bins(lengths: Sequence[int], count: int) -> tuple[list[list[int]], int]:
    """Indices of `lengths` in `count` bins of about equal sums, longest first into the emptiest; the largest sum."""
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
    """The packed row of the sequences at `indices`, filled up to `length` with padding segments no longer than them.

    With context parallelism, the part that rank `cp_rank` of `cp_size` holds; `length` is a multiple of 2 `cp_size`.
    """
    chosen = [sequences[i] for i in indices]
    lengths = np.array([len(s.ids) for s in chosen], dtype=np.int64)
    segments = np.concatenate([lengths, _padding(length - int(lengths.sum()), int(lengths.max(initial=1)))])
    offsets = np.concatenate([[0], np.cumsum(segments)])
    ids = np.zeros(length, dtype=np.int64)
    ids[: lengths.sum()] = np.concatenate([s.ids for s in chosen]) if chosen else 0
    positions = np.arange(length) - np.repeat(offsets[:-1], segments)
    mine = fill_bins([s.trained for s in chosen], cp_size)[0][cp_rank]  # whose loss this rank computes
    targets = np.concatenate([np.empty(0, dtype=np.int64), *(offsets[i] + chosen[i].places for i in mine)])
    local, places = local_rows(length, cp_rank, cp_size), gathered_places(length, cp_size)
    trained = np.array([chosen[i].trained for i in mine], dtype=np.int64)
    chosen_here = np.array([indices[i] for i in mine], dtype=np.int64)
    arrays = ids[None, local], positions[None, local], places[targets - 1], ids[targets], trained, chosen_here
    on_device = [torch.from_numpy(array).to(device) for array in arrays]
    packing = make_packing(segments, device, cp_rank, cp_size)
    held_ids, held_positions, rows, answers, counts, responses = on_device
    support_ids = _support_ids([chosen[i] for i in mine], device)
    return MicroBatch(
        chosen_here.tolist(),
        held_ids,
        held_positions,
        packing,
        rows,
        answers,
        counts,
        responses,
        support_ids=support_ids,
    )


def _support_ids(mine: list[TokenSequence], device: torch.device) -> torch.Tensor | None:
    """int64 [T, k]: the tokens that each trained token's softmax runs over; None for the vocabulary."""
    support_rows = [sequence.support_ids for sequence in mine if sequence.support_ids is not None]
    if not support_rows:
        return None
    if len(support_rows) < len(mine):
        raise ValueError("some responses of an update have support ids, others not")
    width = max(rows.shape[1] for rows in support_rows)
    padded = [np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1) for rows in support_rows]
    return torch.from_numpy(np.concatenate(padded).astype(np.int64)).to(device)


def _padding(rest: int, longest: int) -> np.ndarray:
    """`rest` tokens as segments of at most `longest`, so that padding does not dominate the cost of attention."""
    whole, part = divmod(rest, longest)
    return np.array([longest] * whole + [part] * (part > 0), dtype=np.int64)
