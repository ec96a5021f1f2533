"""The entropy bonus: a reward for distributions of the next token that stay broad."""

from __future__ import annotations

from torch import Tensor

from mugrpo_megatron.algorithm.segments import Segments
from mugrpo_megatron.recipe.objective import ObjectiveSection


def entropy_loss(entropy: Tensor, segments: Segments, config: ObjectiveSection) -> Tensor:
    """The bonus's part of each token's loss [T]: -`entropy_coef` x weight x H (A3C, arXiv 1602.01783, section 4).

    It has the weight of the token in the update's loss. As the KL penalty, it counts on the mask before the veto.

    Args:
        entropy: [T] nats: of the current policy's distribution where each token was sampled, at the sampling
            temperature and over the whole vocabulary.
    """
    return -config.entropy_coef * segments.weights.to(entropy.dtype)[segments.ids] * entropy
