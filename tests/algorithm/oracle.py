"""Every objective once more, as a plain loop over tokens in Python floats, gradient written out by hand.

Shares nothing with the package but the recipe's field names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mugrpo_megatron.recipe import ObjectiveSection


@dataclass
class Answer:
    loss: float
    gradient: list[list[float]]
    kept: list[list[bool]]
    clipped: list[list[bool]]


def objective(
    logprobs: list[list[float]],
    behaviour: list[list[float]],
    advantages: list[float],
    weights: list[float],
    config: ObjectiveSection,
    correction: list[list[float]] | None = None,
    reference: list[list[float]] | None = None,
) -> Answer:
    """Loss and gradient of an update of ragged responses; `weights` per token of each response, `reference` the
    log-probabilities of the policy to clip around, None for the one that `logprobs` are of."""
    ratios = [[lp - b for lp, b in zip(*pair, strict=True)] for pair in zip(logprobs, behaviour, strict=True)]
    kept = [veto(logs, a, config) for logs, a in zip(ratios, advantages, strict=True)]
    low, high = config.clip_low, config.clip_high
    if config.second_moment == "clip":
        bound = m2po_bound(ratios, advantages, config.second_moment_budget)
        low, high = max(low, math.exp(-bound)), min(high, math.exp(bound) if bound < 700 else math.inf)
    if config.second_moment == "drop":
        dropped = m2po_dropped(ratios, config.second_moment_budget)
        kept = [[k and (i, t) not in dropped for t, k in enumerate(row)] for i, row in enumerate(kept)]
    if config.sequence_mask is not None:
        for i, logs in enumerate(ratios):
            if logs and advantages[i] < 0 and -sum(logs) / len(logs) > config.sequence_mask:
                kept[i] = [False] * len(logs)
    scale = 1.0
    if config.renormalise:
        everything = sum(w * len(row) for w, row in zip(weights, kept, strict=True))
        left = sum(w * sum(row) for w, row in zip(weights, kept, strict=True))
        scale = everything / left if left > 0 else 1.0
    loss, gradient, clipped = 0.0, [], []
    for i, logs in enumerate(ratios):
        level_gradient = [0.0] * len(logs)
        clipped.append([False] * len(logs))
        for t in range(len(logs)):
            level, reach = level_of(logs, t, config.ratio)
            inside = abs(level) <= 20
            ratio = math.exp(min(max(level, -20), 20))
            a = advantages[i]
            reach_of_clip = (low, high)
            if config.clip_centre == "reference":
                from_reference = [lp - b for lp, b in zip((reference or logprobs)[i], behaviour[i], strict=True)]
                centre = math.exp(min(max(level_of(from_reference, t, config.ratio)[0], -20), 20))
                reach_of_clip = (max(centre - (1 - low), 0), centre + (high - 1))
            value, d_ratio, d_logprob, clipped[i][t] = token(ratio, logprobs[i][t], a, *reach_of_clip, config)
            weight = weights[i] * scale * (correction[i][t] if correction else 1.0) * kept[i][t]
            loss += weight * value
            level_gradient[t] += weight * d_logprob
            if inside:
                for s, share in reach:
                    level_gradient[s] += weight * d_ratio * ratio * share
        gradient.append(level_gradient)
    return Answer(loss, gradient, kept, clipped)


def level_of(logs: list[float], t: int, kind: str) -> tuple[float, list[tuple[int, float]]]:
    """Log of the importance ratio of token t, and its derivative in each token's log-ratio."""
    if kind == "token":
        return logs[t], [(t, 1.0)]
    share = 1 / len(logs) if kind == "sequence_mean" else 1.0
    return math.fsum(logs) * share, [(s, share) for s in range(len(logs))]


def token(
    ratio: float, logprob: float, a: float, low: float, high: float, config: ObjectiveSection
) -> tuple[float, float, float, bool]:
    """Loss of one token, its derivatives in ratio and in log-probability, and whether the clip acts."""
    value = d_ratio = d_logprob = 0.0
    clipped = False
    if config.surrogate == "ppo":
        clamped = min(max(ratio, low), high)
        gain, d_ratio = (ratio * a, -a) if ratio * a <= clamped * a else (clamped * a, 0.0)
        clipped = (a > 0 and ratio > high) or (a < 0 and ratio < low)
        if config.dual_clip is not None and a < 0 and ratio > config.dual_clip:
            gain, d_ratio, clipped = config.dual_clip * a, 0.0, True
        value = -gain
    else:
        tapered = min(max(ratio, low), high)
        clipped = tapered != ratio
        if config.surrogate == "topr" and a > 0:
            tapered = 1.0
        if config.surrogate == "topr" and a >= 0:
            clipped = False
        value, d_logprob = -tapered * a * logprob, -tapered * a
    if config.tv_penalty:
        value += config.tv_penalty * abs(ratio - 1) / 2
        d_ratio += config.tv_penalty / 2 * ((ratio > 1) - (ratio < 1))
    return value, d_ratio, d_logprob, clipped


def veto(logs: list[float], a: float, config: ObjectiveSection) -> list[bool]:
    """Which tokens of one response stay: the paper's sets, T the triggers and kappa the position of the first."""
    everything = set(range(len(logs)))
    measures = logs if config.trigger == "token" else [math.fsum(logs[: t + 1]) / (t + 1) for t in everything]
    below = {t for t in everything if config.trigger_ratio > 0 and measures[t] < math.log(config.trigger_ratio)}
    triggers = below if a < 0 else set()
    if not triggers:
        return [True] * len(logs)
    kappa = min(triggers)
    suffix = {t for t in everything if t > kappa}
    dropped = {
        "none": set(),
        "trigger": triggers,
        "suffix": suffix,
        "suffix_non_trigger": suffix - triggers,
        "response": everything,
    }[config.veto]
    return [t not in dropped for t in range(len(logs))]


def m2po_bound(ratios: list[list[float]], advantages: list[float], budget: float) -> float:
    """Clip bound on log-ratios of M2PO as released: over the tokens that a clip can act on."""
    harmful = sorted(
        log**2
        for logs, a in zip(ratios, advantages, strict=True)
        for log in logs
        if (a > 0 and log > 0) or (a < 0 and log < 0)
    )
    n = len(harmful)
    if n == 0 or sum(harmful) / n <= budget:
        return math.inf
    before = 0.0
    for k, d in enumerate(harmful):
        if before + d + d * (n - k - 1) >= budget * n:
            return math.sqrt(harmful[k - 1]) if k else 0.0
        before += d
    raise AssertionError("the last token alone reaches the budget")


def m2po_dropped(ratios: list[list[float]], budget: float) -> set[tuple[int, int]]:
    """Tokens dropped, largest first, until the mean square of the rest is below the budget; one is kept."""
    left = sorted((log**2, i, t) for i, logs in enumerate(ratios) for t, log in enumerate(logs))
    dropped = set()
    while len(left) > 1 and math.fsum(d for d, _, _ in left) / len(left) >= budget:
        _, i, t = left.pop()
        dropped.add((i, t))
    return dropped
