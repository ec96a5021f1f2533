"""Which tokens an update's loss keeps, what each response weighs in it, and the correction for the engine mismatch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mugrpo_megatron.algorithm.advantages import informative
from mugrpo_megatron.algorithm.segments import Segments, response_sum
from mugrpo_megatron.algorithm.surrogates import LOG_RATIO_LIMIT
from mugrpo_megatron.algorithm.veto import KeepMask, VetoState, veto
from mugrpo_megatron.recipe.objective import ObjectiveSection


def keep_mask(
    log_ratio: Tensor,
    advantage: Tensor,
    segments: Segments,
    config: ObjectiveSection,
    log_drop: Tensor,
    state: VetoState,
) -> KeepMask:
    """Compute which tokens stay in the loss, and the veto's state after these tokens.

    Args:
        log_ratio: [T] log of current over behaviour probability; no gradient flows through a mask.
        advantage: [T], for each token the advantage of its response, without a teacher's part.
        log_drop: [], nats: tokens whose log-ratio is larger than this in magnitude are dropped.
        state: the veto's `initial_state`, or its state after the earlier tokens of the same responses.
    """
    log_ratio = log_ratio.detach()
    veto_mask = veto(log_ratio, advantage, segments, config, state)
    keep = veto_mask.keep & (log_ratio.abs().double() <= log_drop)
    if config.reject != "none":
        keep = keep & _accepted(log_ratio, segments, config)
    return replace(veto_mask, keep=keep)


def _accepted(log_ratio: Tensor, segments: Segments, config: ObjectiveSection) -> Tensor:
    """bool [T]: whether the ratio of the token's response, exp(sum of log-ratios), is in `config.reject_range`.

    verl calls this rejection sampling.
    """
    ratio = response_sum(log_ratio, segments).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return ((ratio >= config.reject_range[0]) & (ratio <= config.reject_range[1]))[segments.ids]


def mismatch_correction(learner: Tensor, engine: Tensor, config: ObjectiveSection) -> Tensor | None:
    """Factor [T] of each token's loss for the mismatch of engine and learner; None if `config.mismatch` is `none`.

    Let w = exp(learner - engine) and [low, high] = `config.mismatch_range`. With `truncate` (TIS) the factor is
    min(max(w, low), high). With `drop` (IcePop) it is w if w is in [low, high], else 0. Both log-probabilities are
    those under the weights that sampled, so the factor is known before the update.

    Args:
        learner: [T] the learner's log-probabilities of the sampled tokens at the stage's start.
        engine: [T] the engine's.
    """
    if config.mismatch == "none":
        return None
    weight = (learner.float() - engine.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if config.mismatch == "truncate":
        return weight.clamp(*config.mismatch_range)
    inside = (weight >= config.mismatch_range[0]) & (weight <= config.mismatch_range[1])
    return torch.where(inside, weight, 0.0)


def counted_responses(
    rewards: np.ndarray, groups: np.ndarray, truncated: np.ndarray, config: ObjectiveSection
) -> np.ndarray | None:
    """bool [N]: the responses of an update that its loss and the loss's denominators count.

    None if `zero_variance` and `truncated` are both `"count"`: then they count all.

    `zero_variance = "mask"` takes out groups with equal rewards (DAPO, arXiv 2503.14476, eq. 8 with its constraint),
    and so does `"leave_out"`, under which an update has such groups only if its stage has no others. `truncated =
    "mask"` takes out responses that were cut (overlong filtering, DAPO's section 3.4; `mask_truncated_completions`
    of TRL, `overlong_filtering` of NeMo-RL, `apply_overlong_filtering` of SkyRL). What is taken out has no KL penalty
    and no entropy bonus either. Advantages do not change: a cut response's reward is in its group's baseline, and a
    group that has only cut responses trains nothing.

    Args:
        rewards: [N], without penalties (`advantages.before_penalty`).
        groups: [N]; equal numbers are one group.
        truncated: bool [N], responses that were cut at the longest length.
    """
    if config.zero_variance == "count" and config.truncated == "count":
        return None
    counted = np.ones(len(rewards), dtype=bool) if config.zero_variance == "count" else informative(rewards, groups)
    return counted & ~truncated if config.truncated == "mask" else counted


def response_weights(
    lengths: Tensor, config: ObjectiveSection, *, constant_length: int, counted: Tensor | None = None
) -> Tensor:
    """The weight that each token of a response has in the update's loss, for every response.

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
    lengths, counts = lengths.to(torch.float64), counted.to(torch.float64)
    match config.reduction:
        case "token_mean":
            weights = 1 / (lengths * counts).sum().clamp(min=1)
        case "sequence_mean":
            weights = 1 / (lengths.clamp(min=1) * counts.sum().clamp(min=1))
        case "constant":
            weights = 1 / (counts.sum().clamp(min=1) * constant_length)
    return weights * counts
