"""Ragged batches: the tokens of many responses, concatenated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """The response of every token in a ragged batch, and its weight in the update's loss.

    T tokens of N responses. Everything is known before the update, so losses of micro-batches sum to the loss of the
    update, in any order, packing or data parallel split.
    """

    ids: Tensor
    """int64 [T]: the response of each token, ascending."""
    positions: Tensor
    """int64 [T]: place of each token in its response, from 0."""
    lengths: Tensor
    """int64 [N]: tokens of each whole response, even if this batch holds only a part of it."""
    weights: Tensor
    """float [N]: weight of a token of the response in the loss, including the update's denominators."""
    correction: Tensor | None = None
    """float [T]: another factor of each token's loss, e.g. for the engine mismatch; None is 1."""
    teacher: Tensor | None = None
    """float [T]: log-probability of each token under the teacher of `objective.teacher`; None without one."""

    @property
    def responses(self) -> int:
        return len(self.lengths)

    def part(self, tokens: slice) -> Segments:
        """Some tokens of the same responses, such as those of one chunk."""
        return _with_values(replace(self, ids=self.ids[tokens], positions=self.positions[tokens]), self, tokens)


def make_segments(
    lengths: Tensor, weights: Tensor, correction: Tensor | None = None, tokens: int | None = None
) -> Segments:
    """Segments of whole responses of `lengths` int64 [N] tokens (0 is allowed), on the device of `lengths`.

    With `tokens`, the sum of `lengths`, the host does not wait for the device to count them.
    """
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=tokens)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(len(ids), device=lengths.device) - starts[ids]
    return Segments(ids, positions, lengths, weights, correction)


def select_responses(segments: Segments, chosen: Tensor, tokens: int | None = None) -> tuple[Segments, Tensor]:
    """Segments of the whole responses `chosen` int64 [n], in this order, and int64 [t] indices of their tokens.

    The indices are into `segments`; `tokens` is t, if it is known, as for `make_segments`.
    """
    part = make_segments(segments.lengths[chosen], segments.weights[chosen], tokens=tokens)
    starts = (segments.lengths.cumsum(0) - segments.lengths)[chosen]
    places = starts[part.ids] + part.positions
    return _with_values(part, segments, places), places


def _with_values(part: Segments, whole: Segments, tokens: slice | Tensor) -> Segments:
    """`part` with the values that `whole` has of its tokens."""
    return replace(
        part,
        correction=None if whole.correction is None else whole.correction[tokens],
        teacher=None if whole.teacher is None else whole.teacher[tokens],
    )


def response_sum(values: Tensor, segments: Segments) -> Tensor:
    """Sum of `values` [T] over each response's tokens, [N]; differentiable."""
    return values.new_zeros(segments.responses).index_add(0, segments.ids, values)


def response_mean(values: Tensor, segments: Segments) -> Tensor:
    """Mean of `values` [T] over each whole response, [N]; 0 for an empty one; differentiable."""
    return response_sum(values, segments) / segments.lengths.clamp(min=1)


def running_sum(values: Tensor) -> Tensor:
    """Sums of `values` [T] up to and with each one, each added in the same order on every device and in every run.

    torch's cumsum of floats has no such order on CUDA, and raises where it is asked for. This one takes log2(T) steps.
    """
    reach = 1
    while reach < len(values):
        values = torch.cat([values[:reach], values[reach:] + values[:-reach]])
        reach *= 2
    return values
