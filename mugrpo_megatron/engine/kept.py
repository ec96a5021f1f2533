"""The tokens that a truncated sampler kept, and the log-probabilities of what it then sampled from.

SGLang samples from the tokens that top-k, top-p and min-p leave, but the log-probabilities that it returns are of the
whole vocabulary at the sampling temperature (`sglang/srt/layers/sampler.py`, 0.5.15). The sampled token's probability
under the policy that sampled it is that among the kept tokens alone. With a top-k these are among the most likely ones
that SGLang can return, so both are known: the learner's softmax runs over the same tokens, and ratios are exact.
"""

from __future__ import annotations

import numpy as np

ABSENT = -1
"""Fills a row of kept tokens that are fewer than top-k."""


def kept_tokens(
    ids: np.ndarray,
    logprobs: np.ndarray,
    sampled: np.ndarray,
    sampled_logprobs: np.ndarray,
    top_p: float,
    min_p: float,
    one_after_another: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Kept tokens int32 [R, k], `ABSENT` where there are fewer, and the sampled ones' logprobs among them float32 [R].

    The rules are SGLang's: top-p keeps a token when those before it have at most `top_p` of the probability, min-p when
    it has at least `min_p` of the most likely one's. A sampled token that rounding or a tie has put outside takes the
    last place.

    Args:
        ids, logprobs: [R, k], k = top-k, most likely first.
        sampled, sampled_logprobs: [R].
        one_after_another: top-p counts from the tokens that top-k left, as on CUDA with min-p; else from all.
    """
    ids, logs = ids.astype(np.int32), logprobs.astype(np.float64)
    outside = ~(ids == sampled[:, None]).any(1)
    ids[outside, -1], logs[outside, -1] = sampled[outside], sampled_logprobs[outside]
    probabilities = np.exp(logs)
    counted = probabilities / probabilities.sum(1, keepdims=True) if one_after_another else probabilities
    keep = np.cumsum(counted, axis=1) - counted <= top_p
    keep &= probabilities >= min_p * probabilities[:, :1]
    keep |= ids == sampled[:, None]
    mass = np.log(np.where(keep, probabilities, 0.0).sum(1))
    return np.where(keep, ids, np.int32(ABSENT)), (sampled_logprobs - mass).astype(np.float32)
