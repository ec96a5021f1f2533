"""Implementations of the loss path for loss_path.py: ours, Liger's, TRL's, and the three GEMMs alone.

Each is a function of the same `Inputs` that returns the loss; `backward` gives d hidden and d weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mugrpo_megatron.algorithm.masks import response_weights
from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.segments import LossInputs, Segments, make_segments
from mugrpo_megatron.kernels.fused_loss import fused_policy_loss
from mugrpo_megatron.kernels.head import HeadLayout, token_logprobs
from mugrpo_megatron.recipe import ObjectiveSection

MU_GRPO = ObjectiveSection(trigger_ratio=0.5)
"""mu-GRPO with a threshold at which the veto has an effect on log-ratios with a standard deviation of half a nat."""
PLAIN = ObjectiveSection(veto="none")
"""An objective that Liger and TRL have too: the clip [0, 5], token mean, no veto."""


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    vocab: int
    response: int
    dtype: str
    device: str
    chunk: int


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    segments: Segments
    shape: Shape

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(self.shape.vocab, chunk=self.shape.chunk)


def make_inputs(shape: Shape) -> Inputs:
    """Make responses of equal length, which need no padding, with log-ratios of a standard deviation of half a nat."""
    torch.manual_seed(0)
    device, dtype = torch.device(shape.device), getattr(torch, shape.dtype)
    hidden = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype) * 0.02).requires_grad_()
    targets = torch.randint(shape.vocab, (shape.tokens,), device=device)
    lengths = torch.full((shape.tokens // shape.response,), shape.response, device=device)
    with torch.no_grad():
        behaviour, _ = token_logprobs(hidden, weight, targets, HeadLayout(shape.vocab, chunk=shape.chunk))
    behaviour = behaviour + 0.5 * torch.randn_like(behaviour)
    advantages = torch.randn(len(lengths), device=device)
    segments = make_segments(lengths, response_weights(lengths, MU_GRPO, constant_length=shape.response))
    return Inputs(hidden, weight, targets, behaviour, advantages, segments, shape)


def fused(inputs: Inputs, config: ObjectiveSection = MU_GRPO, main_grad: Tensor | None = None) -> Tensor:
    """The fused loss with the veto, in one pass; the gradient of the weight is added to `main_grad`, as in a run."""
    return fused_policy_loss(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        LossInputs(config, inputs.behaviour, inputs.advantages, inputs.segments),
        inputs.layout,
        main_grad=main_grad,
    ).loss


def fused_without_veto(inputs: Inputs) -> Tensor:
    return fused(inputs, PLAIN)


def fused_two_passes(inputs: Inputs) -> Tensor:
    """The fused loss of an objective that depends on whole responses (GSPO)."""
    return fused(inputs, ObjectiveSection(name="gspo"))


def recomputed(inputs: Inputs) -> Tensor:
    """Chunked log-probabilities under autograd, usable for any loss; logits are computed twice."""
    logprobs, _ = token_logprobs(inputs.hidden, inputs.weight, inputs.targets, inputs.layout)
    return _loss(inputs, logprobs, MU_GRPO)


def materialised(inputs: Inputs) -> Tensor:
    """The loss from all logits at once, in float32 as in the fused path."""
    logits = (inputs.hidden @ inputs.weight.T).float()
    logprobs = logits.log_softmax(1).gather(1, inputs.targets[:, None])[:, 0]
    return _loss(inputs, logprobs, MU_GRPO)


def logprobs_only(inputs: Inputs) -> Tensor:
    """Log-probabilities without gradients: the cost of behaviour log-probabilities."""
    with torch.no_grad():
        return token_logprobs(inputs.hidden, inputs.weight, inputs.targets, inputs.layout)[0].sum()


def floor(inputs: Inputs) -> Tensor:
    """The three GEMMs of forward and backward in chunks; the weight gradient is summed in the inputs' type."""
    with torch.no_grad():
        d_weight = torch.zeros_like(inputs.weight)
        for start in range(0, inputs.shape.tokens, inputs.shape.chunk):
            hidden = inputs.hidden[start : start + inputs.shape.chunk]
            logits = hidden @ inputs.weight.T
            d_hidden = logits @ inputs.weight
            d_weight.addmm_(logits.T, hidden)
        return d_hidden.sum() + d_weight[0, 0]


def liger(inputs: Inputs) -> Tensor:
    """Liger's fused GRPO loss, with its default chunk of one response."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    shape = inputs.shape
    batch = (shape.tokens // shape.response, shape.response)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, epsilon_low=1.0, epsilon_high=4.0, loss_type="dapo")
    return loss(
        inputs.hidden.view(*batch, -1),
        inputs.weight,
        inputs.targets.view(batch),
        torch.ones(batch, device=shape.device),
        inputs.advantages,
        old_per_token_logps=inputs.behaviour.view(batch),
    )[0]


def trl_materialised(inputs: Inputs) -> Tensor:
    """TRL's log-probabilities from all logits."""
    from trl.trainer.utils import selective_log_softmax

    return _loss(inputs, selective_log_softmax(inputs.hidden @ inputs.weight.T, inputs.targets), PLAIN)


def trl_fused_head(inputs: Inputs) -> Tensor:
    """The log-probabilities that TRL's GRPO trainer computes with `add_fused_lm_head`."""
    from trl.trainer import utils

    head = utils._ChunkedLogProbFunction
    logprobs = head.apply(
        inputs.hidden,
        inputs.weight,
        None,
        inputs.targets,
        1.0,
        utils._CHUNKED_LOGPROB_CHUNK_SIZE,
        None,
        1.0,
        ("log_probs",),
    )[0]
    return _loss(inputs, logprobs, PLAIN)


def _loss(inputs: Inputs, logprobs: Tensor, config: ObjectiveSection) -> Tensor:
    return policy_loss(logprobs, LossInputs(config, inputs.behaviour, inputs.advantages, inputs.segments))[0]


WAYS: dict[str, Callable[[Inputs], Tensor]] = {
    "floor": floor,
    "fused": fused,
    "fused_without_veto": fused_without_veto,
    "fused_two_passes": fused_two_passes,
    "recomputed": recomputed,
    "materialised": materialised,
    "logprobs_only": logprobs_only,
    "liger": liger,
    "trl_materialised": trl_materialised,
    "trl_fused_head": trl_fused_head,
}
NEEDS = {"liger": "liger_kernel", "trl_materialised": "trl", "trl_fused_head": "trl"}
"""Implementation -> the package that it needs, unless that is torch."""
