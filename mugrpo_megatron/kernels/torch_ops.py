"""Row-wise work on a chunk of logits: softmax statistics and the gradient, in PyTorch for any device.

`triton_ops` has the same two functions. Both take raw logits and scale them by the inverse temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = -1e30
"""The maximum over no logits, and the logit of a token that is masked out. It is finite, so that the difference of two
of them is 0 and not nan."""
CACHE_ELEMENTS = 1 << 17
"""Number of logits that are processed together: 512 KiB of float32 stay in a core's cache during the passes below."""


@dataclass(frozen=True, slots=True)
class EntropyTerm:
    """What the gradient of an entropy term needs: the entropies of n tokens, and the loss's derivative in each."""

    value: Tensor
    """float32 [n], nats: H of each token's distribution over the tokens of all ranks."""
    d_entropy: Tensor
    """float32 [n]: derivative of the loss in each H."""


def statistics(logits: Tensor, scale: float, valid: int, targets: Tensor) -> Tensor:
    """Compute softmax statistics of each row of logits over its first `valid` columns, float32 [4, n].

    Args:
        logits: float32 [n, columns], not changed.
        scale: factor of every logit.
        valid: columns that are tokens; may be 0.
        targets: int64 [n] columns; outside [0, valid) where another rank holds the target.

    Returns:
        Four rows, in which `logit` is a logit times `scale`: the maximum m; sum of exp(logit - m); sum of
        exp(logit - m) * logit; the target's logit, or 0 if another rank holds it. With `valid` = 0: FLOOR, 0, 0, 0.
    """
    out = torch.zeros(4, len(logits), dtype=torch.float32, device=logits.device)
    if not valid:
        out[0] = FLOOR
        return out
    block = max(1, CACHE_ELEMENTS // valid)
    space = torch.empty(min(block, len(logits)), valid, dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), block):
        scores = logits[start : start + block, :valid]
        rows = slice(start, start + len(scores))
        out[0, rows] = scores.amax(1) * scale
        weights = torch.add(-out[0, rows, None], scores, alpha=scale, out=space[: len(scores)]).exp_()
        out[1, rows] = weights.sum(1)
        out[2, rows] = weights.mul_(scores).sum(1) * scale
    local = (targets >= 0) & (targets < valid)
    target_logits = logits.gather(1, targets.clamp(0, valid - 1)[:, None])[:, 0] * scale
    out[3] = torch.where(local, target_logits, 0.0)
    return out


def gradient(
    logits: Tensor,
    scale: float,
    valid: int,
    targets: Tensor,
    lse: Tensor,
    d_logprobs: Tensor,
    dtype: torch.dtype,
    entropy: EntropyTerm | None = None,
) -> Tensor:
    """Compute the gradient of sum(d_logprobs * logprob) in the raw logits, [n, columns] of `dtype`.

    It is d_logprobs * scale * (onehot(target) - softmax), and 0 in the columns from `valid` on. With `entropy`, the
    gradient of sum(entropy.d_entropy * H) is added: -entropy.d_entropy * scale * softmax * (log softmax + H). `logits`
    is overwritten.

    Args:
        lse: float32 [n], log-sum-exp of the scaled logits over the whole vocabulary.
        d_logprobs: float32 [n], derivative of the loss in each log-probability.
    """
    factor = d_logprobs * scale
    block = max(1, CACHE_ELEMENTS // max(valid, 1))
    for start in range(0, len(logits), block):
        scores = logits[start : start + block, :valid]
        rows = slice(start, start + block)
        torch.add(-lse[rows, None], scores, alpha=scale, out=scores)
        if entropy is None:
            scores.exp_().mul_(-factor[rows, None])
        else:
            entropy_factor = entropy.d_entropy[rows, None] * scale
            softmax_factor = torch.add(scores, entropy.value[rows, None]).mul_(entropy_factor).add_(factor[rows, None])
            scores.exp_().mul_(softmax_factor.neg_())
    logits[:, valid:] = 0.0
    onehot = ((targets >= 0) & (targets < valid)).float() * factor
    logits.scatter_add_(1, targets.clamp(0, logits.shape[1] - 1)[:, None], onehot[:, None])
    return logits.to(dtype)
