"""Surrogates: the loss of one token, given its importance ratio and its advantage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.segments import Segments, response_mean, response_sum
from mugrpo_megatron.errors import FunctionFailure
from mugrpo_megatron.recipe.functions import ForeignFailure, arguments_of, call_foreign, load_function
from mugrpo_megatron.recipe.objective import ObjectiveSection

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this many nats before exp: exp(20) is 4.9e8, finite in every type except float16."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The T tokens that a surrogate computes losses of, usually those of whole responses.

    If `config.dependence` is not `response`, they may be a chunk that begins or ends inside a response. Gradients flow
    through `logprobs`, and through `log_ratio` and `ratio`, which are computed from it.
    """

    logprobs: Tensor
    """[T]: log-probabilities under the current policy."""
    behaviour: Tensor
    """[T]: log-probabilities under the behaviour policy, by which the importance ratio divides."""
    log_ratio: Tensor
    """[T]: `logprobs - behaviour`, not clamped."""
    ratio: Tensor
    """[T]: importance ratio at the level that `objective.ratio` names."""
    advantage: Tensor
    """[T]: advantage of each token."""
    low: Tensor
    """[] or [T]: lower end of the clip range."""
    high: Tensor
    """[] or [T]: upper end of the clip range."""
    segments: Segments
    """The response and the position of each token."""

    def detached(self) -> TokenBatch:
        return replace(
            self, logprobs=self.logprobs.detach(), log_ratio=self.log_ratio.detach(), ratio=self.ratio.detach()
        )


@dataclass(frozen=True, slots=True)
class SurrogateLoss:
    """Losses of T tokens before weights, and the tokens that the clip acts on."""

    loss: Tensor
    """[T]: loss of each token, before its weight."""
    clipped: Tensor
    """bool [T]: the clip removes the token's gradient (`ppo`, `dppo`, `gmpo`) or bounds its weight (`cispo`, `topr`).

    `sapo` and `vespo` have no clip.
    """


Surrogate = Callable[[TokenBatch, ObjectiveSection], SurrogateLoss]


def log_ratios(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """The log-ratios [T], `logprobs - behaviour`: float64 if `logprobs` are float64, else float32."""
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return logprobs.to(dtype) - behaviour.to(dtype)


def importance_ratio(log_ratio: Tensor, segments: Segments, config: ObjectiveSection) -> Tensor:
    """Importance ratio [T] at the level that `config.ratio` names, from token log-ratios [T]; differentiable.

    `token`: r_t = exp(l_t). `sequence_mean`: exp(mean_t l_t) (GSPO, arXiv 2507.18071, eq. 7).
    `sequence`: exp(sum_t l_t), the trajectory's ratio (TOPR, arXiv 2503.14286).
    """
    level = log_ratio
    if config.ratio != "token":
        reduced = (response_mean if config.ratio == "sequence_mean" else response_sum)(log_ratio, segments)
        level = reduced[segments.ids]
    # On responses that are stale by a whole stage, the log-ratio of a single token may be 50 nats. exp(50) times an
    # advantage would outweigh all other tokens of the update.
    return level.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def recentre_clip(centre: Tensor, low: Tensor, high: Tensor, config: ObjectiveSection) -> tuple[Tensor, Tensor]:
    """Move the clip range to `centre` [T], the importance ratio of the proximal policy; no gradient flows through it.

    `proximal_shifted` adds `centre - 1` to both ends, and raises a negative lower end to 0: off-policy GRPO's f_eps
    (arXiv 2505.22257), which clips the ratio within eps of the ratio of the policy that the iteration started from.
    `proximal_scaled` multiplies both ends by `centre`: with r_prox = pi_prox / beta,
    r_prox min(r / r_prox A, clip(r / r_prox, low, high) A) = min(r A, clip(r, low r_prox, high r_prox) A)
    is decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298, eq. 5).
    """
    if config.clip_centre == "proximal_shifted":
        return (centre - (1 - low)).clamp(min=0), centre + (high - 1)
    return centre * low, centre * high


def ppo(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """-min(r A, clip(r, low, high) A) (PPO, arXiv 1707.06347, eq. 7).

    With dual clip d the minimum is replaced by its maximum with d A where A < 0.
    """
    ratio, advantage, low, high = tokens.ratio, tokens.advantage, tokens.low, tokens.high
    # clamp is not used on the gradient's path: torch 2.14 halves or drops its gradient at a bound, and M2PO's bound is
    # the ratio of a token.
    inside = torch.where((ratio >= low) & (ratio <= high), ratio, ratio.detach().clamp(low, high))
    gain = torch.minimum(ratio * advantage, inside * advantage)
    clipped = torch.where(advantage > 0, ratio > high, (advantage < 0) & (ratio < low))
    if config.dual_clip is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, config.dual_clip * advantage), gain)
        clipped = clipped | ((advantage < 0) & (ratio > config.dual_clip))
    return SurrogateLoss(-gain, clipped)


def cispo(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """-sg(clip(r, low, high)) A log pi (CISPO, arXiv 2506.13585, eq. 4): every token keeps its gradient."""
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(tokens.low, tokens.high)
    return SurrogateLoss(-weight * tokens.advantage * tokens.logprobs, weight != ratio)


def topr(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """-A log pi where A > 0, -sg(clip(r, low, high)) A log pi where A < 0 (TOPR, arXiv 2503.14286)."""
    ratio, advantage = tokens.ratio.detach(), tokens.advantage
    tapered = ratio.clamp(tokens.low, tokens.high)
    weight = torch.where(advantage > 0, torch.ones_like(tapered), tapered)
    return SurrogateLoss(-weight * advantage * tokens.logprobs, (advantage < 0) & (tapered != ratio))


DPPO_TV = 0.15
"""Limit of DPPO's divergence at a token, the paper's (arXiv 2602.04879)."""
SAPO_TAU = (1.0, 1.05)
"""SAPO's temperatures for A > 0 and for other tokens, the paper's (arXiv 2511.20347)."""
VESPO_POSITIVE, VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""VESPO's k and lambda for A > 0 and for other responses, the defaults of TRL."""


def dppo(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """-sg(clip(r, low, high)) A log pi inside a trust region of probabilities (DPPO, arXiv 2602.04879).

    A token whose divergence exceeds the limit loses its gradient where a step would increase the divergence: if p > m
    for A > 0, if p < m for A < 0, with p the token's probability now and m the behaviour policy's. The divergence is
    the binary total variation |p - m|.
    """
    ratio, advantage = tokens.ratio.detach(), tokens.advantage
    now, before = tokens.logprobs.detach().clamp(max=0), tokens.behaviour.clamp(max=0)
    probability, sampled = now.exp(), before.exp()
    far = (probability - sampled).abs() > DPPO_TV
    away = torch.where(advantage > 0, probability > sampled, (advantage < 0) & (probability < sampled))
    outside = away & far
    loss = -ratio.clamp(tokens.low, tokens.high) * advantage * tokens.logprobs
    return SurrogateLoss(torch.where(outside, 0.0, loss), outside)


def sapo(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the advantage's sign (SAPO, arXiv 2511.20347): no token is clipped."""
    positive = tokens.advantage > 0
    tau = _by_sign(positive, *SAPO_TAU, tokens.ratio)
    gate = torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau
    return SurrogateLoss(-gate * tokens.advantage, torch.zeros_like(positive))


def gmpo(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """-exp(mean_t l'_t) A, with l' the log-ratio clipped on PPO's side alone (GMPO, arXiv 2507.20673).

    l' is min(l, log high) where A > 0 and max(l, log low) where A < 0. So A is multiplied by the geometric mean of a
    response's clipped ratios.
    """
    log_ratio, advantage = tokens.log_ratio, tokens.advantage
    low, high = tokens.low.log(), tokens.high.log()
    clipped = torch.where(advantage > 0, log_ratio > high, (advantage < 0) & (log_ratio < low))
    limited = torch.where(clipped, torch.where(advantage > 0, high, low), log_ratio)
    level = response_mean(limited, tokens.segments)[tokens.segments.ids]
    return SurrogateLoss(-level.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * advantage, clipped)


def vespo(tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """-sg(r^k exp(lambda (1 - r))) A log pi, k and lambda by the advantage's sign (VESPO, arXiv 2602.10693).

    r is the ratio of the whole response. The weight is 1 at r = 1, highest at r = k / lambda, and tends to 0 as r goes
    to 0 or to infinity.
    """
    ratio, positive = tokens.ratio.detach(), tokens.advantage > 0
    power = _by_sign(positive, VESPO_POSITIVE[0], VESPO_NEGATIVE[0], ratio)
    decay = _by_sign(positive, VESPO_POSITIVE[1], VESPO_NEGATIVE[1], ratio)
    weight = (decay * (1 - ratio) + power * ratio.log()).exp()
    return SurrogateLoss(-weight * tokens.advantage * tokens.logprobs, torch.zeros_like(positive))


def surrogate_of(config: ObjectiveSection) -> Surrogate:
    """The token loss that `config.surrogate` names. Raises UserError if a user's function cannot be loaded."""
    if config.surrogate in SURROGATES:
        return SURROGATES[config.surrogate]
    function = load_function("objective.surrogate", config.surrogate)
    return lambda tokens, section: user_surrogate(function, tokens, section)


def user_surrogate(function: Surrogate, tokens: TokenBatch, config: ObjectiveSection) -> SurrogateLoss:
    """Call the user's surrogate on T tokens, and check what it returns.

    Raises FunctionFailure when the function fails, or does not return a `SurrogateLoss` with a differentiable `loss`
    [T] in the type of `tokens.log_ratio`, and `clipped` bool [T].
    """
    name = f"objective.surrogate = {config.surrogate}"
    result = call_user_function(name, function, tokens, config)
    if not isinstance(result, SurrogateLoss):
        raise FunctionFailure(f"{name} returned {type(result).__name__}, not SurrogateLoss(loss, clipped)")
    expected = (("loss", result.loss, tokens.log_ratio.dtype), ("clipped", result.clipped, torch.bool))
    for field, tensor, dtype in expected:
        if not isinstance(tensor, Tensor) or tensor.shape != tokens.logprobs.shape or tensor.dtype != dtype:
            value = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            wanted = f"{dtype} {list(tokens.logprobs.shape)}, one value a token"
            raise FunctionFailure(f"{name} returned {field} as {value}; it has to be {wanted}")
    if tokens.logprobs.requires_grad and not result.loss.requires_grad:
        raise FunctionFailure(
            f"{name} returned a loss without a gradient; compute it from tokens.logprobs, tokens.log_ratio or "
            "tokens.ratio, and do not detach it"
        )
    return result


def call_user_function(name: str, function: Callable[..., Any], tokens: TokenBatch, config: ObjectiveSection) -> Any:
    """Call a user's function with `tokens`, `config` or both, as its parameters name them.

    Raises FunctionFailure when it fails, UserError when it takes neither or needs another argument.
    """
    try:
        taken = arguments_of(name, function, ("tokens", "config"))
        given = {"tokens": tokens, "config": config}
        return call_foreign(lambda: function(**{argument: given[argument] for argument in taken}), hidden=[__file__])
    except ForeignFailure as failure:
        raise FunctionFailure(f"{name} failed: {failure}; correct the function and run the command again") from None


def _by_sign(positive: Tensor, where_positive: float, elsewhere: float, like: Tensor) -> Tensor:
    """[T]: `where_positive` where `positive` [T] is true, `elsewhere` at the other tokens; with the dtype of `like`."""
    return torch.where(positive, like.new_tensor(where_positive), like.new_tensor(elsewhere))


SURROGATES: dict[str, Surrogate] = {
    "ppo": ppo,
    "cispo": cispo,
    "topr": topr,
    "dppo": dppo,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
}


def entropy_loss(entropy: Tensor, segments: Segments, config: ObjectiveSection) -> Tensor:
    """The entropy bonus in each token's loss [T]: -`entropy_coef` x weight x H (A3C, arXiv 1602.01783, section 4).

    The weight is that of the token in the update's loss. Like the KL penalty, the bonus applies to vetoed tokens too.

    Args:
        entropy: [T] nats: of the current policy's distribution where each token was sampled, at the sampling
            temperature and over the whole vocabulary.
    """
    return -config.entropy_coef * segments.weights.to(entropy.dtype)[segments.ids] * entropy
