"""Which tokens take part in the loss (the veto and other methods' masks), and the engine mismatch correction."""

from __future__ import annotations

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.segments import Segments, response_mean, response_sum
from mugrpo_megatron.algorithm.surrogates import LOG_RATIO_LIMIT
from mugrpo_megatron.algorithm.veto import Veto, VetoState, initial_state, veto
from mugrpo_megatron.recipe.objective import ObjectiveSection


def keep_mask(
    log_ratio: Tensor,
    advantage: Tensor,
    segments: Segments,
    config: ObjectiveSection,
    log_drop: Tensor,
    state: VetoState | None = None,
) -> Veto:
    """Tokens that stay in the loss, and the veto's state after them.

    Args:
        log_ratio: [T] log of current over behaviour probability; no gradient flows through a mask.
        advantage: [T].
        log_drop: []: tokens whose log-ratio is larger in magnitude are dropped.
        state: of the veto, if the tokens continue earlier ones of the same responses.
    """
    log_ratio = log_ratio.detach()
    verdict = veto(log_ratio, advantage, segments, config, initial_state(segments) if state is None else state)
    keep = verdict.keep & (log_ratio.abs().double() <= log_drop)
    if config.sequence_mask is not None:
        keep = keep & ~_off_policy(log_ratio, advantage, segments, config.sequence_mask)
    if config.reject != "none":
        keep = keep & _accepted(log_ratio, segments, config)
    return Veto(keep, verdict.state)


def _accepted(log_ratio: Tensor, segments: Segments, config: ObjectiveSection) -> Tensor:
    """bool [T]: the ratio of the response, or its geometric mean a token, is in bounds (verl: rejection sampling)."""
    level = (response_sum if config.reject == "sequence" else response_mean)(log_ratio, segments)
    ratio = level.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return ((ratio >= config.reject_low) & (ratio <= config.reject_high))[segments.ids]


def _off_policy(log_ratio: Tensor, advantage: Tensor, segments: Segments, delta: float) -> Tensor:
    """Off-policy sequence mask: A < 0 and mean_t(log behaviour - log pi) > delta (DeepSeek-V3.2, arXiv 2512.02556)."""
    return (advantage < 0) & (-response_mean(log_ratio, segments)[segments.ids] > delta)


def mismatch_correction(learner: Tensor, engine: Tensor, config: ObjectiveSection) -> Tensor | None:
    """Factor of each token's loss for the mismatch of engine and learner; None where `config.mismatch` is `none`.

    Known before the update. With w = exp(learner - engine), both for the weights that sampled:
    `truncate`: min(max(w, low), high) (TIS); `drop`: w inside [low, high], else 0 (IcePop).

    Args:
        learner: [T] log-probabilities that the learner gave the sampled tokens at the stage's start.
        engine: [T] the engine's own.
    """
    if config.mismatch == "none":
        return None
    weight = (learner.float() - engine.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if config.mismatch == "truncate":
        return weight.clamp(config.mismatch_low, config.mismatch_high)
    inside = (weight >= config.mismatch_low) & (weight <= config.mismatch_high)
    return torch.where(inside, weight, 0.0)
