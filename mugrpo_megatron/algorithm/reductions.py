"""How token losses sum to the loss of an update: one weight for each response, known before the update."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mugrpo_megatron.recipe.objective import ObjectiveSection


def response_weights(
    lengths: Tensor, config: ObjectiveSection, *, constant_length: int, counted: Tensor | None = None
) -> Tensor:
    """Weight of one token of each response in the update's loss.

    Args:
        lengths: int64 [N], response tokens of every response of the WHOLE update, over all data parallel ranks.
        config: its `reduction` is one of
            `token_mean`: every token 1 / tokens (DAPO, arXiv 2503.14476, eq. 8);
            `sequence_mean`: every response 1 / responses, spread over its tokens (GRPO, arXiv 2402.03300, eq. 3);
            `constant`: every token 1 / (responses * constant_length) (Dr.GRPO, arXiv 2503.20783).
        constant_length: tokens; the longest response that can be sampled.
        counted: bool [N], responses that take part; the others have weight 0 and are not in the denominators.

    Returns:
        float64 [N].
    """
    counted = torch.ones_like(lengths, dtype=torch.bool) if counted is None else counted
    counts = counted.to(torch.float64)
    return _WEIGHTS[config.reduction](lengths.to(torch.float64), counts, constant_length) * counts


def _token_mean(lengths: Tensor, counts: Tensor, constant_length: int) -> Tensor:
    return torch.ones_like(lengths) / (lengths * counts).sum().clamp(min=1)


def _sequence_mean(lengths: Tensor, counts: Tensor, constant_length: int) -> Tensor:
    return 1 / (lengths.clamp(min=1) * counts.sum().clamp(min=1))


def _constant(lengths: Tensor, counts: Tensor, constant_length: int) -> Tensor:
    return torch.ones_like(lengths) / (counts.sum().clamp(min=1) * constant_length)


_WEIGHTS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "constant": _constant,
}
