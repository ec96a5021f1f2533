"""Every objective once more, as a plain loop over tokens in Python floats, gradient written out by hand.

Shares nothing with the package but the recipe's field names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mugrpo_megatron.recipe import ObjectiveSection

TURN = 3
"""Tokens of every turn, where turns count."""


@dataclass
class Answer:
    loss: float
    gradient: list[list[float]]
    keep: list[list[bool]]
    clipped: list[list[bool]]


def objective(
    logprobs: list[list[float]],
    behaviour: list[list[float]],
    advantages: list[float],
    weights: list[float],
    config: ObjectiveSection,
    correction: list[list[float]] | None = None,
    proximal: list[list[float]] | None = None,
    ref: list[list[float]] | None = None,
) -> Answer:
    """Loss and gradient of an update of ragged responses; `weights` per token of each response, `proximal` the
    log-probabilities of the policy to clip around, None for the one that `logprobs` are of, `ref` of the policy of
    the KL penalty."""
    ratios = [[lp - b for lp, b in zip(*pair, strict=True)] for pair in zip(logprobs, behaviour, strict=True)]
    keep = [veto(logs, a, config) for logs, a in zip(ratios, advantages, strict=True)]
    low, high = config.clip_low, config.clip_high
    if config.second_moment == "clip":
        bound = m2po_bound(ratios, advantages, 0.04)
        low, high = max(low, math.exp(-bound)), min(high, math.exp(bound) if bound < 700 else math.inf)
    if config.second_moment == "drop":
        dropped = m2po_dropped(ratios, 0.04)
        keep = [[k and (i, t) not in dropped for t, k in enumerate(row)] for i, row in enumerate(keep)]
    if config.reject != "none":
        for i, logs in enumerate(ratios):
            level = math.exp(min(max(math.fsum(logs), -20), 20))
            if not config.reject_range[0] <= level <= config.reject_range[1]:
                keep[i] = [False] * len(logs)
    loss, gradient, clipped = 0.0, [], []
    for i, logs in enumerate(ratios):
        level_gradient = [0.0] * len(logs)
        clipped.append([False] * len(logs))
        from_reference = [lp - b for lp, b in zip((proximal or logprobs)[i], behaviour[i], strict=True)]
        ranges = [clip_range(from_reference, t, low, high, config) for t in range(len(logs))]
        for t in range(len(logs)):
            level, reach = level_of(logs, t, config.ratio)
            inside = abs(level) <= 20
            ratio = math.exp(min(max(level, -20), 20))
            a = advantages[i]
            if config.surrogate == "gmpo":
                level, reach, clipped[i][t] = geometric_mean(logs, t, a, ranges)
                inside, ratio = abs(level) <= 20, math.exp(min(max(level, -20), 20))
                value, d_ratio, d_logprob = -ratio * a, -a, 0.0
            elif config.surrogate == "dppo":
                value, d_ratio, d_logprob, clipped[i][t] = dppo(
                    ratio, logprobs[i][t], behaviour[i][t], a, *ranges[t], config
                )
            else:
                value, d_ratio, d_logprob, clipped[i][t] = token(ratio, logprobs[i][t], a, *ranges[t], config)
            weight = weights[i] * (correction[i][t] if correction else 1.0) * keep[i][t]
            weight *= prefix_weight(logs, t, advantages[i], config)
            loss += weight * value
            level_gradient[t] += weight * d_logprob
            if inside:
                for s, share in reach:
                    level_gradient[s] += weight * d_ratio * ratio * share
            if ref:
                value, derivative = kl(logprobs[i][t] - ref[i][t], logs[t], config)
                loss += weights[i] * config.kl_coef * value
                level_gradient[t] += weights[i] * config.kl_coef * derivative
        gradient.append(level_gradient)
    return Answer(loss, gradient, keep, clipped)


def kl(d: float, log_ratio: float, config: ObjectiveSection) -> tuple[float, float]:
    """Penalty of a token whose log-probability is `d` above the reference policy's, and its derivative in the
    log-probability."""
    near = max(d, -20.0)
    grown = math.exp(-near)
    estimator = config.kl_penalty[:2]
    value, derivative = {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (grown - 1 + near, (1 - grown) * (d >= -20)),
    }[estimator]
    if config.kl_penalty == estimator:
        return value, derivative
    ratio = math.exp(min(max(log_ratio, -20), 20))
    if abs(log_ratio) > 20:
        return ratio * value, 0.0
    return ratio * value, ratio * derivative + (ratio * value if estimator != "k2" else 0.0)


def level_of(logs: list[float], t: int, kind: str) -> tuple[float, list[tuple[int, float]]]:
    """Log of the importance ratio of token t, and its derivative in each token's log-ratio."""
    if kind == "token":
        return logs[t], [(t, 1.0)]
    share = 1 / len(logs) if kind == "sequence_mean" else 1.0
    return math.fsum(logs) * share, [(s, share) for s in range(len(logs))]


def clip_range(
    from_reference: list[float], t: int, low: float, high: float, config: ObjectiveSection
) -> tuple[float, float]:
    """Clip range of token t: around 1, moved to the proximal policy's ratio, or times it."""
    centre = math.exp(min(max(level_of(from_reference, t, config.ratio)[0], -20), 20))
    if config.clip_centre == "one":
        return low, high
    if config.clip_centre == "proximal_scaled":
        return centre * low, centre * high
    return max(centre - (1 - low), 0), centre + (high - 1)


def geometric_mean(
    logs: list[float], t: int, a: float, ranges: list[tuple[float, float]]
) -> tuple[float, list[tuple[int, float]], bool]:
    """GMPO: mean of the log-ratios held below log high (A > 0) or above log low (A < 0), its derivative, and whether
    token t is held."""
    bounds = [high if a > 0 else low for low, high in ranges]
    bounds = [math.log(bound) if bound > 0 else -math.inf for bound in bounds]
    beyond = [log > bound if a > 0 else a < 0 and log < bound for log, bound in zip(logs, bounds, strict=True)]
    held = [bound if out else log for log, bound, out in zip(logs, bounds, beyond, strict=True)]
    level = math.fsum(held) / len(logs)
    return level, [(s, 1 / len(logs)) for s, out in enumerate(beyond) if not out], beyond[t]


def dppo(
    ratio: float, logprob: float, sampled: float, a: float, low: float, high: float, config: ObjectiveSection
) -> tuple[float, float, float, bool]:
    """DPPO: truncated weight times log-probability, zero where the binary divergence is beyond the limit and grows."""
    p, m = math.exp(min(logprob, 0.0)), math.exp(min(sampled, 0.0))
    outside = abs(p - m) > 0.15 and ((a > 0 and p > m) or (a < 0 and p < m))
    weight = 0.0 if outside else min(max(ratio, low), high)
    return -weight * a * logprob, 0.0, -weight * a, outside


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
        if config.dual_clip is not None and a < 0 and gain < config.dual_clip * a:
            gain, d_ratio, clipped = config.dual_clip * a, 0.0, True
        value = -gain
    elif config.surrogate == "sapo":
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700.0)))
        value, d_ratio = -4 / tau * gate * a, -4 * gate * (1 - gate) * a
    elif config.surrogate == "vespo":
        k, decay = (2, 3) if a > 0 else (3, 2)
        weight = ratio**k * math.exp(max(decay * (1 - ratio), -700.0))
        value, d_logprob = -weight * a * logprob, -weight * a
    else:
        tapered = min(max(ratio, low), high)
        clipped = tapered != ratio
        if config.surrogate == "topr" and a > 0:
            tapered = 1.0
        if config.surrogate == "topr" and a >= 0:
            clipped = False
        value, d_logprob = -tapered * a * logprob, -tapered * a
    return value, d_ratio, d_logprob, clipped


def prefix_weight(logs: list[float], t: int, a: float, config: ObjectiveSection) -> float:
    """Weight of token t by the tokens before it: min(1, product) or min(1, minimum) of their ratios where A < 0."""
    if config.veto not in ("prefix", "prefix_min") or (a >= 0 and config.prefix_signs == "negative"):
        return 1.0
    before = logs[t - t % TURN : t] if config.veto_reach == "turn" else logs[:t]
    return math.exp(min(0.0, math.fsum(before) if config.veto == "prefix" else min(before, default=0.0)))


def veto(logs: list[float], a: float, config: ObjectiveSection) -> list[bool]:
    """Which tokens of one response stay: the paper's sets, T the triggers and kappa the position of the first."""
    if config.veto in ("prefix", "prefix_min"):
        return [prefix_weight(logs, t, a, config) > 0 for t in range(len(logs))]
    everything = set(range(len(logs)))
    below = {t for t in everything if config.trigger_ratio > 0 and logs[t] < math.log(config.trigger_ratio)}
    dropped: set[int] = set()
    length = TURN if config.veto_reach == "turn" else max(len(logs), 1)
    for turn in (everything & set(range(start, start + length)) for start in range(0, len(logs), length)):
        triggers = below & turn if a < 0 else set()
        if triggers:
            suffix = {t for t in turn if t > min(triggers)}
            dropped |= {
                "none": set(),
                "trigger": triggers,
                "suffix": suffix,
                "suffix_non_trigger": suffix - triggers,
                "response": turn,
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
