"""FLOP of a model's passes, counted from its shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mugrpo_megatron.weights.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Work:
    """Forward FLOP of one token: 2 for each weight that it is multiplied with."""

    layers: float
    attention: float
    """Scores and weighted values over the tokens before it, on average."""
    head: float
    """One product with the output weight; the learner computes it for trained tokens only."""


def work_of(architecture: Architecture, sequence: float) -> Work:
    """Per token of sequences of `sequence` tokens on average."""
    size, layers = architecture.letters, architecture.layers
    feed_forward = 3 * size["H"] * size["F"]
    if architecture.experts:
        chosen = architecture.transformer["moe_router_topk"]
        feed_forward = 3 * size["H"] * size["M"] * chosen + size["H"] * size["E"]
    attention = size["H"] * (size["Q"] + 2 * size["K"]) + size["Q"] * size["H"]
    return Work(
        layers=2.0 * layers * (attention + feed_forward),
        attention=2.0 * layers * 2 * size["Q"] * sequence / 2,
        head=2.0 * size["V"] * size["H"],
    )


def model_flops(architecture: Architecture, lengths: Sequence[int], trained: int) -> float:
    """FLOP that an update of the model needs at least: forward once, backward twice that.

    As in "model FLOPs utilization" (arXiv 2204.02311, appendix B): what is computed again for memory's sake, padding
    and extra passes do not count. Attention is counted as causal, half of the full square.

    Args:
        lengths: tokens of each sequence, the prompt included.
        trained: tokens with a loss, whose logits are computed.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    work = work_of(architecture, 1.0)
    return 3.0 * float(work.layers * tokens.sum() + work.attention * np.square(tokens).sum() + work.head * trained)
