"""The loss path: hidden states of a micro-batch -> log-probabilities of its trained tokens -> the update's loss.

`Objective` is the recipe's loss, on the fused path; `from_token_loss` makes one of any function of log-probabilities.
Both apply the output weight chunk by chunk and only at positions that predict a trained token, so the logits of a
whole micro-batch never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from megatron.core import parallel_state

from mugrpo_megatron.algorithm.advantages import informative
from mugrpo_megatron.algorithm.masks import mismatch_correction, response_weights
from mugrpo_megatron.algorithm.segments import Segments, make_segments, select_responses, with_turns
from mugrpo_megatron.algorithm.statistics import UpdateStatistics
from mugrpo_megatron.kernels.fused_loss import fused_policy_loss
from mugrpo_megatron.kernels.head import HeadLayout, token_logprobs
from mugrpo_megatron.learner.context import gather_rows
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.linear import with_stand_in
from mugrpo_megatron.learner.model import PolicyModel, gather_sequence
from mugrpo_megatron.learner.optimizer import loss_scale
from mugrpo_megatron.learner.packing import MicroBatch
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Sample

HiddenLoss = Callable[[PolicyModel, torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor]]
"""(last chunk's model, its hidden states, micro-batch) -> scalar and, detached, log-probabilities and entropies
float32 [2, T]; the scalars of an update's micro-batches sum to its loss."""
TokenLoss = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
"""(logprobs float32 [T], micro-batch) -> scalar."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective on N whole responses of T tokens, in the order of the update's samples."""

    section: ObjectiveSection
    behaviour: torch.Tensor
    """float32 [T]"""
    advantages: torch.Tensor
    """float32 [N]"""
    segments: Segments
    proximal: torch.Tensor | None
    """float32 [T]: under the policy that the clip range is centred on; None for the current policy."""
    ref: torch.Tensor | None = None
    """float32 [T]: under the policy of the KL penalty; None without one."""

    def loss(self, learner: Learner, statistics: UpdateStatistics | None) -> HiddenLoss:
        """The loss of a micro-batch: of the responses in it, with the weights of the whole update.

        Gradients of the output weight go directly into its `main_grad`, times the loss scale that the gradient passed
        to backward is; it is 1 but in float16.
        """
        scale = loss_scale(learner.optimizer)
        layout = head_layout(learner, learner.recipe.rollout.temperature)
        direct = learner.lanes == 1

        def loss(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
            weight = model.output_weight()
            main_grad = getattr(weight, "main_grad", None) if direct else None  # Megatron's buffer; none if frozen
            if main_grad is not None and not model.shares_weight:  # an embedding has a gradient of its own
                weight = with_stand_in(weight)
            segments, tokens = select_responses(self.segments, batch.responses, len(batch.targets))
            fused = fused_policy_loss(
                states_before_targets(model, hidden, batch),
                weight,
                batch.targets,
                self.behaviour[tokens],
                self.advantages[batch.responses],
                segments,
                self.section,
                layout,
                support_ids=batch.support_ids,
                statistics=statistics,
                proximal=None if self.proximal is None else self.proximal[tokens],
                ref=None if self.ref is None else self.ref[tokens],
                main_grad=main_grad,
                grad_scale=scale,
            )
            return fused.loss, torch.stack([fused.logprobs, fused.entropy])

        return loss


def make_objective(learner: Learner, samples: Sequence[Sample], advantages: np.ndarray) -> Objective:
    """The recipe's objective on an update's samples, with all denominators from the whole update.

    Tokens outside a loss mask do not exist for it: lengths and denominators count the others alone.
    """
    recipe, device = learner.recipe, learner.ranks.device
    lengths = torch.tensor([len(s.trained(s.response_ids)) for s in samples], device=device)
    counted = None
    if recipe.objective.zero_variance == "mask":
        rewards, groups = np.array([s.reward for s in samples]), np.array([s.group for s in samples])
        counted = torch.from_numpy(informative(rewards, groups)).to(device)
    weights = response_weights(
        lengths, recipe.objective, constant_length=recipe.rollout.max_response_tokens, counted=counted
    )
    behaviour = _column(samples, "behaviour_logprobs", "name", device)
    if behaviour.isnan().any():  # a comparison with NaN is false, so the masks would drop these tokens silently
        raise ValueError("behaviour logprobs hold NaN: the stage has none of its own, the learner has to compute them")
    correction = None
    if recipe.objective.mismatch != "none":
        engine = _flat([s.trained(s.engine_logprobs) for s in samples], device)
        correction = mismatch_correction(behaviour, engine, recipe.objective)
    segments = make_segments(lengths, weights, correction, tokens=len(behaviour))
    if recipe.objective.veto_reach == "turn":
        segments = with_turns(segments, [s.turns for s in samples])
    section, proximal, ref = recipe.objective, None, None
    if section.proximal_every > 1:  # else the proximal policy is the current policy
        proximal = _column(samples, "proximal_logprobs", f"proximal_every = {section.proximal_every}", device)
    if section.kl_ref is not None:
        ref = _column(samples, "ref_logprobs", f'kl_ref = "{section.kl_ref}"', device)
    if section.teacher is not None:
        teacher = _column(samples, "teacher_logprobs", f'teacher = "{section.teacher}"', device)
        segments = replace(segments, teacher=teacher)
    own = torch.from_numpy(np.asarray(advantages, dtype=np.float32)).to(device)
    return Objective(section, behaviour, own, segments, proximal, ref)


def _column(samples: Sequence[Sample], field: str, key: str, device: torch.device) -> torch.Tensor:
    """The field's logprobs of all trained tokens; ValueError where a sample has none, naming the objective's `key`."""
    values = [(sample, getattr(sample, field)) for sample in samples]
    if any(logprobs is None for _, logprobs in values):
        raise ValueError(f"objective.{key} needs every sample's {field}")
    return _flat([sample.trained(logprobs) for sample, logprobs in values], device)


def _flat(rows: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(rows).astype(np.float32)).to(device)


def from_token_loss(learner: Learner, token_loss: TokenLoss, temperature: float) -> HiddenLoss:
    """The loss of any differentiable function of log-probabilities; computes the logits twice."""

    def loss(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = logprobs_and_entropy(learner, model, hidden, batch, temperature)
        return token_loss(logprobs, batch), torch.stack([logprobs.detach(), entropy])

    return loss


def logprobs_and_entropy(
    learner: Learner, model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy, float32 [T], of a micro-batch's trained tokens; differentiable.

    Rows of the output weight beyond the vocabulary are padding and take no part in the softmax.
    """
    rows = states_before_targets(model, hidden, batch)
    return token_logprobs(
        rows, model.output_weight(), batch.targets, head_layout(learner, temperature), batch.support_ids
    )


def states_before_targets(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Hidden states [T, h] that predict the trained tokens, from the last pipeline stage's output [t, 1, h].

    t is divided by TP under sequence parallelism. The backward pass sums the gradient over the tensor and context
    parallel ranks.
    """
    whole = gather_sequence(hidden, model.config.sequence_parallel)
    if batch.packing.split:
        whole = gather_rows(whole)
    return whole.index_select(0, batch.rows)


def head_layout(learner: Learner, temperature: float) -> HeadLayout:
    """What the kernels need of the output layer besides its weight."""
    return HeadLayout(
        vocab_size=learner.architecture.vocab_size,
        temperature=temperature,
        tp_group=parallel_state.get_tensor_model_parallel_group() if learner.ranks.tp_size > 1 else None,
        chunk=learner.recipe.learner.chunk_tokens(learner.ranks.device.type == "cuda"),
    )
