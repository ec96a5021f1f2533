"""The loss path: hidden states of a micro-batch -> log-probabilities of its trained tokens -> the update's loss.

`objective_loss` is the recipe's loss, on the fused path; `from_token_loss` takes any function of log-probabilities.
Both apply the output weight chunk by chunk and only at positions that predict a trained token, so the logits of a
whole micro-batch never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from megatron.core import parallel_state

from mugrpo_megatron.algorithm.advantages import before_penalty
from mugrpo_megatron.algorithm.masks import counted_responses, mismatch_correction, response_weights
from mugrpo_megatron.algorithm.segments import LossInputs, make_segments, with_turns
from mugrpo_megatron.algorithm.statistics import UpdateStatistics
from mugrpo_megatron.kernels.fused_loss import fused_policy_loss
from mugrpo_megatron.kernels.head import HeadLayout, token_logprobs
from mugrpo_megatron.learner.context import gather_rows
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.linear import with_placeholder_grad
from mugrpo_megatron.learner.model import PolicyModel, gather_sequence
from mugrpo_megatron.learner.optimizer import loss_scale
from mugrpo_megatron.learner.packing import MicroBatch
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Sample, penalties, rewards_and_groups, trained_lengths

HiddenLoss = Callable[[PolicyModel, torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor]]
"""(last chunk's model, its hidden states, micro-batch) -> scalar and, detached, log-probabilities and entropies
float32 [2, T]; the scalars of an update's micro-batches sum to its loss."""
TokenLoss = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
"""(logprobs float32 [T], micro-batch) -> scalar."""


def objective_loss(learner: Learner, inputs: LossInputs, statistics: UpdateStatistics | None) -> HiddenLoss:
    """Make the function that computes the objective's loss of a micro-batch.

    `inputs` are those of the whole update, in the order of its samples. Unless ranks run several micro-batches at once
    (`Learner.lanes`), the function adds the gradient of a trained output weight directly to its `main_grad`. That
    gradient is multiplied by the loss scale (1 except in float16); the backward pass starts from the same scale.
    """
    scale = loss_scale(learner.optimizer)
    layout = head_layout(learner, learner.recipe.rollout.temperature)
    # Threads that run micro-batches at once on CPU must not add to the shared main_grad: they return their gradients,
    # which are then added in order (cpu.megatron).
    direct = learner.lanes == 1

    def loss(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        weight = model.output_weight()
        # Megatron's DDP sets main_grad on trained parameters only; with adapters the output weight is frozen.
        main_grad = getattr(weight, "main_grad", None) if direct else None
        # DDP's hook has to be called exactly once for each weight. For a tied weight the embedding's gradient calls it.
        if main_grad is not None and not model.shares_weight:
            weight = with_placeholder_grad(weight)
        fused = fused_policy_loss(
            states_before_targets(model, hidden, batch),
            weight,
            batch.targets,
            # The micro-batch has packed token ids. Its advantages, behaviour logprobs etc. are selected here from the
            # inputs of the whole update, by the indices of its responses.
            inputs.select(batch.responses, len(batch.targets)),
            layout,
            support_ids=batch.support_ids,
            statistics=statistics,
            main_grad=main_grad,
            grad_scale=scale,
        )
        return fused.loss, torch.stack([fused.logprobs, fused.entropy])

    return loss


def make_loss_inputs(
    section: ObjectiveSection,
    longest_response: int,
    samples: Sequence[Sample],
    advantages: np.ndarray,
    device: torch.device,
) -> LossInputs:
    """Make the objective's inputs from the samples of a whole update, whose advantages are `advantages` float [N].

    `longest_response` is `rollout.max_response_tokens`. Tokens outside a sample's loss mask are left out: lengths and
    denominators do not count them.
    """
    lengths = torch.tensor(trained_lengths(samples), device=device)
    rewards, groups = rewards_and_groups(samples)
    truncated = np.array([s.finish_reason == "length" for s in samples], dtype=bool)
    rows = counted_responses(before_penalty(rewards, penalties(samples)), groups, truncated, section)
    counted = None if rows is None else torch.from_numpy(rows).to(device)
    weights = response_weights(lengths, section, constant_length=longest_response, counted=counted)
    behaviour = _column(samples, "behaviour_logprobs", "rollout.behaviour", device)
    # Comparisons with NaN are false, so the veto and the masks would take wrong decisions silently.
    if behaviour.isnan().any():
        raise ValueError(
            "the behaviour log-probabilities are NaN, because the stage was imported without any; the learner must "
            'compute them: set rollout.behaviour = "learner"'
        )
    correction = None
    if section.mismatch != "none":
        engine = _flat([s.trained(s.engine_logprobs) for s in samples], device)
        correction = mismatch_correction(behaviour, engine, section)
    # The host knows the number of tokens, so it need not wait for the device in repeat_interleave.
    segments = make_segments(lengths, weights, tokens=len(behaviour))
    if section.veto_reach == "turn":
        segments = with_turns(segments, [s.turns for s in samples])
    proximal = ref = teacher = None
    # With proximal_every = 1 the proximal policy is the current policy and needs no column.
    if section.proximal_every > 1:
        proximal = _column(samples, "proximal_logprobs", f"objective.proximal_every = {section.proximal_every}", device)
    if section.kl_ref is not None:
        ref = _column(samples, "ref_logprobs", f'objective.kl_ref = "{section.kl_ref}"', device)
    if section.teacher is not None:
        teacher = _column(samples, "teacher_logprobs", f'objective.teacher = "{section.teacher}"', device)
    per_response = torch.from_numpy(np.asarray(advantages, dtype=np.float32)).to(device)
    return LossInputs(section, behaviour, per_response, segments, correction, proximal, ref, teacher)


def _column(samples: Sequence[Sample], field: str, key: str, device: torch.device) -> torch.Tensor:
    """The log-probabilities float32 [T] of all trained tokens, from the samples' `field`.

    Raises ValueError, which names the recipe's `key`, if a sample has none.
    """
    values = [(sample, getattr(sample, field)) for sample in samples]
    if any(logprobs is None for _, logprobs in values):
        raise ValueError(
            f"{key} needs {field} in every sample, and some samples have none; pass samples of a stage that has this "
            "column"
        )
    return _flat([sample.trained(logprobs) for sample, logprobs in values], device)


def _flat(rows: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(rows).astype(np.float32)).to(device)


def from_token_loss(learner: Learner, token_loss: TokenLoss, temperature: float) -> HiddenLoss:
    """Make the function that computes `token_loss` of a micro-batch's log-probabilities at `temperature`.

    `token_loss` may be any differentiable function. The output layer takes 4 GEMMs; the fused path takes 3 for
    most objectives.
    """

    def loss(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = logprobs_and_entropy(learner, model, hidden, batch, temperature)
        return token_loss(logprobs, batch), torch.stack([logprobs.detach(), entropy])

    return loss


def logprobs_and_entropy(
    learner: Learner, model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probability (differentiable) and entropy, each float32 [T], of a micro-batch's trained tokens.

    Rows of the output weight beyond the vocabulary are padding and take no part in the softmax.
    """
    rows = states_before_targets(model, hidden, batch)
    return token_logprobs(
        rows, model.output_weight(), batch.targets, head_layout(learner, temperature), batch.support_ids
    )


def states_before_targets(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Select hidden states [T, h] that predict trained tokens, from the output [t, 1, h] of the last pipeline stage.

    Under sequence parallelism t is a rank's part of the rows. The backward pass sums the gradient over the tensor and
    context parallel ranks.
    """
    states = gather_sequence(hidden, model.config.sequence_parallel)
    if batch.packing.split:
        states = gather_rows(states)
    # Only rows that predict trained tokens are multiplied with the vocabulary; prompts and padding are often most of a
    # row.
    return states.index_select(0, batch.rows)


def head_layout(learner: Learner, temperature: float) -> HeadLayout:
    """How the learner's output layer is sharded, and the settings of its logits, as the kernels take them."""
    return HeadLayout(
        vocab_size=learner.architecture.vocab_size,
        temperature=temperature,
        tp_group=parallel_state.get_tensor_model_parallel_group() if learner.ranks.tp_size > 1 else None,
        chunk=learner.recipe.learner.chunk_tokens(learner.ranks.device.type == "cuda"),
    )
