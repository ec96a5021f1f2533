"""Compares learner and engine: whether both give the same tokens the same log-probabilities, up to rounding.

The functions are pure. A run calls them on a few texts before it generates (`phases.agreement`); responses of other
servers can be compared in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BOUNDS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1, "fp8": 0.3}
"""dtype of the matrix products -> the largest mean of |engine - learner|, in nats a token, that rounding explains.

Measured with SGLang on CPU and small random models: below 4e-7 in float32; in bfloat16 0.005 (Llama) to 0.019
(Qwen3-MoE). The bounds of float16 and fp8 are estimates: no engine on CPU multiplies in fp8.
"""
GROWS = 3.0
"""If the mean difference over the last quarters of all texts is at least this many times that over their first
quarters, it counts as growing with the position."""


class Agreement(NamedTuple):
    """The distance of the log-probabilities of engine and learner on the same tokens."""

    mean: float
    """Mean of |engine - learner| in nats a token; NaN if a log-probability is not finite."""
    tokens: int
    growth: float
    """The mean of |engine - learner| over the last quarters of all texts, divided by that over their first quarters; 1
    if the latter is 0."""


def agreement(engine: Sequence[np.ndarray], learner: Sequence[np.ndarray]) -> Agreement:
    """Compare the log-probabilities that engine and learner give the same texts.

    `engine` and `learner` have a float32 array [R] for each text of R tokens. Without any token the mean is 0.
    """
    distances = [np.abs(ours.astype(np.float64) - theirs) for ours, theirs in zip(learner, engine, strict=True)]
    together = np.concatenate([np.zeros(0), *distances])
    if not len(together):
        return Agreement(0.0, 0, 1.0)
    first = np.concatenate([row[: max(1, len(row) // 4)] for row in distances])
    last = np.concatenate([row[-max(1, len(row) // 4) :] for row in distances])
    growth = float(last.mean() / first.mean()) if first.mean() > 0 else 1.0
    mean = float(together.mean())
    return Agreement(mean if np.isfinite(mean) else np.nan, len(together), growth)


def bound(dtype: str, fp8: bool = False) -> float:
    """The largest mean of |engine - learner| that rounding explains, in nats a token.

    `dtype` is `model.dtype`; `fp8` says whether engine or learner multiplies in fp8.
    """
    return BOUNDS["fp8" if fp8 else dtype]


def disagreement(found: Agreement, most: float, unread: Sequence[str] = ()) -> str:
    """Return a sentence with the likely cause if engine and learner are more than `most` nats a token apart, or if a
    log-probability is not finite; else "".

    `unread`: names of fields of config.json that this project ignores, because it takes them to have no effect.
    """
    if found.mean <= most:
        return ""
    if np.isnan(found.mean):
        return (
            f"of {found.tokens} tokens, some log-probabilities of the engine or the learner are not finite: weights or "
            "activations overflow; look at model.dtype, and at the checkpoint for values that are not finite"
        )
    causes = []
    if found.growth >= GROWS:
        causes.append("the difference grows with the position, so look at rope_theta and the rope scaling first")
    if unread:
        causes.append(
            f"these fields were taken to be without effect: {', '.join(unread)}; remove them from config.json"
        )
    causes.append(
        "compare config.json with the published model's; `mugrpo doctor DIR` names the fields that this project ignores"
    )
    return (
        f"engine and learner differ by {found.mean:.3g} nats a token on {found.tokens} tokens with the same weights, "
        f"and rounding explains {most:g}: they compute different models. Likely a field of config.json that one of "
        f"them reads and the other does not: {'; '.join(causes)}"
    )
