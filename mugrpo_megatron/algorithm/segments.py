"""Ragged batches: the tokens of many responses, concatenated, and the numbers that the loss reads for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mugrpo_megatron.recipe.objective import ObjectiveSection

if TYPE_CHECKING:  # only tests need jaxtyping: they check the shapes that the types give (tests/shapes.py)
    from jaxtyping import Float, Int64


@dataclass(frozen=True, slots=True)
class Segments:
    """The response of each token of a ragged batch, and the token's weight in the update's loss.

    A ragged batch is N responses of different lengths, T tokens in all, one after another. Weights are fixed before the
    update, so the losses of micro-batches sum to the loss of the update in any order, packing or data parallel split.
    """

    ids: Int64[Tensor, " tokens"]
    """Number of the response that each token belongs to, ascending."""
    positions: Int64[Tensor, " tokens"]
    """Index of each token in its response, from 0."""
    lengths: Int64[Tensor, " responses"]
    """Number of tokens of each whole response, even if this batch holds only some of them."""
    weights: Float[Tensor, " responses"]
    """The weight of each token of a response in the update's loss; the loss's denominators are a part of it."""
    turns: Int64[Tensor, " tokens"] | None = None
    """Number of the turn that each token belongs to in its response, from 0 and below `most_turns`; None if every
    response has one turn."""
    most_turns: int = 1
    """Number of turns of the response with the most turns."""

    @property
    def responses(self) -> int:
        return len(self.lengths)

    def chunk(self, tokens: slice) -> Segments:
        """The segments of the chosen tokens alone. `ids` still counts all N responses."""
        return replace(
            self, ids=self.ids[tokens], positions=self.positions[tokens], turns=slice_or_none(self.turns, tokens)
        )

    def turn_ids(self) -> Tensor:
        """int64 [T]: the turn of each token, numbered over all responses: in response `i` from `i * most_turns` on.

        If every response has one turn, this is the number of the response.
        """
        return self.ids if self.turns is None else self.ids * self.most_turns + self.turns


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the loss reads besides the current log-probabilities: the objective, and values for each of T tokens
    and for each of N responses."""

    config: ObjectiveSection
    behaviour: Float[Tensor, " tokens"]
    """Log-probabilities under the policy that the importance ratio is taken against."""
    advantages: Float[Tensor, " responses"]
    segments: Segments
    correction: Float[Tensor, " tokens"] | None = None
    """Factor of each token's loss for the mismatch of engine and learner; None stands for 1."""
    proximal: Float[Tensor, " tokens"] | None = None
    """Log-probabilities under the policy at the clip's centre; None stands for the current policy."""
    ref: Float[Tensor, " tokens"] | None = None
    """Log-probabilities under the reference policy of the KL penalty; None without a penalty."""
    teacher: Float[Tensor, " tokens"] | None = None
    """Log-probabilities under the teacher of `objective.teacher`; None without a teacher."""

    def chunk(self, tokens: slice) -> LossInputs:
        """The inputs of the chosen tokens alone; advantages, lengths and weights are still those of all N responses."""
        return self._at(self.segments.chunk(tokens), self.advantages, tokens)

    def select(self, responses: Tensor, tokens: int | None = None) -> LossInputs:
        """The inputs of the n whole responses that `responses` int64 [n] lists, in this order.

        `tokens` is their number of tokens if the caller knows it; the host then does not wait for the device.
        """
        segments, indices = select_responses(self.segments, responses, tokens)
        return self._at(segments, self.advantages[responses], indices)

    def _at(self, segments: Segments, advantages: Tensor, tokens: slice | Tensor) -> LossInputs:
        return LossInputs(
            self.config,
            self.behaviour[tokens],
            advantages,
            segments,
            correction=slice_or_none(self.correction, tokens),
            proximal=slice_or_none(self.proximal, tokens),
            ref=slice_or_none(self.ref, tokens),
            teacher=slice_or_none(self.teacher, tokens),
        )


def slice_or_none(column: Tensor | None, tokens: slice | Tensor) -> Tensor | None:
    """The chosen tokens of `column` [T], which has a number for each token; None if `column` is None."""
    return None if column is None else column[tokens]


def make_segments(lengths: Tensor, weights: Tensor, tokens: int | None = None) -> Segments:
    """Make the segments of whole responses of `lengths` int64 [N] tokens (0 is allowed), on the device of `lengths`.

    If the sum of `lengths` is passed as `tokens`, the host does not wait for the device to compute it.
    """
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=tokens)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(len(ids), device=lengths.device) - starts[ids]
    return Segments(ids, positions, lengths, weights)


def with_turns(segments: Segments, turns: Sequence[np.ndarray]) -> Segments:
    """Add each token's turn to the segments of whole responses; `turns` has an int64 [tokens] for each response."""
    flat = np.concatenate([np.empty(0, dtype=np.int64), *turns])
    return replace(
        segments, turns=torch.from_numpy(flat).to(segments.ids.device), most_turns=int(flat.max(initial=0)) + 1
    )


def select_responses(segments: Segments, responses: Tensor, tokens: int | None = None) -> tuple[Segments, Tensor]:
    """Select the n whole responses that `responses` int64 [n] lists, with t tokens in all.

    Returns their segments, in the order of `responses`, and the int64 [t] indices of their tokens among the tokens of
    `segments`. `tokens` is t if the caller knows it; the host then does not wait for the device.
    """
    selected = make_segments(segments.lengths[responses], segments.weights[responses], tokens)
    starts = (segments.lengths.cumsum(0) - segments.lengths)[responses]
    indices = starts[selected.ids] + selected.positions
    turns = slice_or_none(segments.turns, indices)
    return replace(selected, turns=turns, most_turns=segments.most_turns), indices


def response_sum(values: Tensor, segments: Segments) -> Tensor:
    """Sum of `values` [T] over each response's tokens, [N]; differentiable."""
    return values.new_zeros(segments.responses).index_add(0, segments.ids, values)


def response_mean(values: Tensor, segments: Segments) -> Tensor:
    """Mean of `values` [T] over each whole response, [N]; 0 for an empty one; differentiable."""
    return response_sum(values, segments) / segments.lengths.clamp(min=1)


def running_sum(values: Tensor) -> Tensor:
    """Inclusive prefix sums of `values` [T], added in the same order on every device and in every run."""
    # torch.cumsum is not used: on CUDA it adds in no fixed order, and raises under use_deterministic_algorithms.
    reach = 1
    while reach < len(values):
        values = torch.cat([values[:reach], values[reach:] + values[:-reach]])
        reach *= 2
    return values
