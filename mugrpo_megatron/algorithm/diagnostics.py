"""Diagnostics of an update, computed from all of the tokens given: ratios, clipping, veto, KL, advantages."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.ref_kl import kl_estimate
from mugrpo_megatron.algorithm.segments import LossInputs, Segments
from mugrpo_megatron.algorithm.surrogates import LOG_RATIO_LIMIT, TokenBatch, call_user_function
from mugrpo_megatron.algorithm.veto import NEVER, TRIGGER_METRICS, KeepMask, trigger_metrics, weighed_by_prefix
from mugrpo_megatron.errors import FunctionFailure
from mugrpo_megatron.recipe.functions import load_function
from mugrpo_megatron.recipe.objective import ObjectiveSection

RATIO_STATISTICS = (
    (
        "mean",
        "mean importance ratio of tokens with negative (`neg`) or positive (`pos`) advantage; `ratio_neg_mean` is the "
        "paper's E[ρ | A < 0]",
    ),
    ("p01", "1st percentile of the ratios of these tokens"),
    ("p50", "median of the ratios of these tokens"),
    ("p99", "99th percentile of the ratios of these tokens"),
    ("min", "smallest ratio of these tokens"),
    ("max", "largest ratio of these tokens"),
)
METRICS: tuple[tuple[str, str, str], ...] = (
    ("loss", "", "loss of the update: minus the surrogate objective, plus the KL penalty, minus the entropy bonus"),
    ("ratio_mean", "ratio", "mean importance ratio of all response tokens; 1 on policy"),
    *((f"ratio_{sign}_{name}", "ratio", meaning) for sign in ("neg", "pos") for name, meaning in RATIO_STATISTICS),
    (
        "clipped_fraction",
        "fraction",
        "share of response tokens whose gradient the clip removes, or with `cispo` and `topr` whose weight it bounds: "
        "the paper's token clipping rate",
    ),
    (
        "vetoed_fraction",
        "fraction",
        "share of response tokens that the veto (the paper's NAV) or a mask drops from the loss",
    ),
    (
        "prefix_weight_lost",
        "fraction",
        "1 - mean prefix weight of the tokens that have one (`objective.veto` is `prefix` or `prefix_min`)",
    ),
    ("vetoed_responses", "fraction", "share of negative responses that have a trigger at the recipe's threshold"),
    (
        "veto_first_trigger",
        "fraction",
        "mean position of the first trigger in its response; the first token is at 0 and the end at 1",
    ),
    ("ess", "fraction", "effective sample size of the token ratios, (sum r)^2 / (n sum r^2); 1 on policy"),
    ("kl_k1", "nats", "mean of log behaviour - log pi: an unbiased estimate of KL(behaviour | pi) per token"),
    (
        "kl_k3",
        "nats",
        "mean of r - 1 - log r: another estimate of KL(behaviour | pi) per token, which is never negative",
    ),
    (
        "kl_ref",
        "nats",
        "mean of exp(-d) - 1 + d with d = log pi - log ref; it estimates KL(pi | ref) per token while the responses "
        "are fresh, and is far above it when they are stale",
    ),
    (
        "kl_ref_k1",
        "nats",
        "mean of log pi - log ref: another estimate of KL(pi | ref) per token while the responses are fresh",
    ),
    ("kl_teacher", "nats", "mean of log pi - log teacher"),
    ("second_moment", "nats^2", "mean squared log-ratio per token"),
    ("logprob_mean", "nats", "mean log-probability of the sampled tokens under the current policy"),
    ("advantage_mean", "", "mean advantage of the responses"),
    ("advantage_std", "", "standard deviation of the responses' advantages"),
    ("advantage_max", "", "largest absolute value of an advantage"),
    ("zero_advantage_fraction", "fraction", "share of responses whose advantage is 0, as in groups with equal rewards"),
    ("update_tokens", "tokens", "number of response tokens of the update"),
    *TRIGGER_METRICS,
)
"""Name, unit and meaning of every metric of `metrics`. A metric is left out if it has nothing to be computed from: no
such tokens or responses, no reference policy, no teacher, or no prefix weights."""

USER_PREFIX = "user/"
USER_NAME = re.compile(r"[A-Za-z0-9_-]+")
RATIO_QUANTILES = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


def metrics(loss: Tensor, tokens: TokenBatch, clipped: Tensor, mask: KeepMask, inputs: LossInputs) -> dict[str, float]:
    """The `METRICS` of T tokens of N whole responses, by name. Means over tokens include vetoed tokens.

    Args:
        loss: [], the loss of the update.
        clipped: bool [T], whether the clip acts on a token (`surrogates.SurrogateLoss`).
    """
    logprobs, log_ratio, advantages, segments = tokens.logprobs, tokens.log_ratio, inputs.advantages, inputs.segments
    values: dict[str, Tensor] = {"loss": loss, "update_tokens": loss.new_full((), len(logprobs), dtype=torch.float64)}
    if len(advantages):
        values |= {
            "advantage_mean": advantages.mean(),
            "advantage_std": advantages.std(correction=0),
            "advantage_max": advantages.abs().max(),
            "zero_advantage_fraction": (advantages == 0).double().mean(),
        }
    if len(logprobs):
        ratio = log_ratio.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        sign = advantages[segments.ids]
        values |= {
            "ratio_mean": ratio.mean(),
            "clipped_fraction": clipped.double().mean(),
            "vetoed_fraction": (~mask.keep).double().mean(),
            "ess": ratio.sum().square() / (len(ratio) * ratio.square().sum()),
            "kl_k1": -log_ratio.double().mean(),
            "kl_k3": (ratio - 1 - log_ratio.double()).mean(),
            "second_moment": log_ratio.double().square().mean(),
            "logprob_mean": logprobs.double().mean(),
        }
        if inputs.ref is not None:
            values["kl_ref"] = kl_estimate(logprobs.double(), inputs.ref, "k3").mean()
            values["kl_ref_k1"] = kl_estimate(logprobs.double(), inputs.ref, "k1").mean()
        if inputs.teacher is not None:
            values["kl_teacher"] = kl_estimate(logprobs.double(), inputs.teacher, "k1").mean()
        if mask.weight is not None and (weighed := weighed_by_prefix(sign, inputs.config)).any():
            values["prefix_weight_lost"] = 1 - mask.weight[weighed].double().mean()
        values |= _ratio_summary("ratio_neg", ratio[sign < 0]) | _ratio_summary("ratio_pos", ratio[sign > 0])
    if segments.responses:
        values |= _trigger_summary(mask.state.first_trigger.view(segments.responses, -1).amin(1), advantages, segments)
    values |= trigger_metrics(log_ratio, advantages, segments, inputs.config)
    # All values are moved to the host at once, because the host would wait for the device at each `.item()`.
    return dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))


def _ratio_summary(prefix: str, ratio: Tensor) -> dict[str, Tensor]:
    if not len(ratio):
        return {}
    ascending = ratio.sort().values
    indices = {name: round(q * (len(ascending) - 1)) for name, q in RATIO_QUANTILES.items()}
    return {f"{prefix}_mean": ratio.mean()} | {f"{prefix}_{name}": ascending[i] for name, i in indices.items()}


def _trigger_summary(first_trigger: Tensor, advantages: Tensor, segments: Segments) -> dict[str, Tensor]:
    negative = (advantages < 0) & (segments.lengths > 0)
    triggered = negative & (first_trigger != NEVER)
    if not negative.any():
        return {}
    fraction = {"vetoed_responses": triggered.double().sum() / negative.double().sum()}
    if not triggered.any():
        return fraction
    return fraction | {"veto_first_trigger": (first_trigger[triggered].double() / segments.lengths[triggered]).mean()}


def user_metrics(tokens: TokenBatch, config: ObjectiveSection) -> dict[str, float]:
    """Call the user's function `config.diagnostics` on an update's tokens; returns its numbers by name, as `user/NAME`.

    Returns an empty dict without such a function. `tokens` are detached. Raises FunctionFailure when the function fails
    or returns anything but a mapping of names to numbers.
    """
    if config.diagnostics is None:
        return {}
    source = f"objective.diagnostics = {config.diagnostics}"
    function = load_function("objective.diagnostics", config.diagnostics)
    with torch.no_grad():
        values = call_user_function(source, function, tokens, config)
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise FunctionFailure(f"{source} returned {kind}, not a mapping of numbers; return a dict of names to numbers")
    values_by_name = {}
    for name, value in values.items():
        if not isinstance(name, str) or not USER_NAME.fullmatch(name):
            raise FunctionFailure(f"{source} returned the name {name!r}; a name may have letters, digits, - and _ only")
        try:
            values_by_name[USER_PREFIX + name] = float(value)
        except Exception:  # no number, a tensor of several, or an integer too large for a float
            kind = type(value).__name__
            raise FunctionFailure(f"{source} returned {name} as {kind}; it has to be one number") from None
    return values_by_name
