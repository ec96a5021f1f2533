"""An update's objective as the loss of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mugrpo_megatron.algorithm.advantages import informative
from mugrpo_megatron.algorithm.corrections import mismatch_correction
from mugrpo_megatron.algorithm.reductions import response_weights
from mugrpo_megatron.algorithm.segments import Segments, make_segments, select_responses
from mugrpo_megatron.algorithm.statistics import UpdateStatistics
from mugrpo_megatron.kernels.fused_loss import fused_policy_loss
from mugrpo_megatron.learner.loss import HiddenLoss, head_layout, predicting
from mugrpo_megatron.learner.model import PolicyModel
from mugrpo_megatron.learner.packing import MicroBatch
from mugrpo_megatron.learner.state import Learner
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Sample


@dataclass(frozen=True, slots=True)
class Objective:
    """What the loss needs of N whole responses of T tokens, in the order of the update's samples."""

    section: ObjectiveSection
    behaviour: torch.Tensor
    """float32 [T]"""
    advantages: torch.Tensor
    """float32 [N]"""
    segments: Segments
    reference: torch.Tensor | None
    """float32 [T]: under the policy that the clip range lies around; None: the current one."""

    def loss(self, learner: Learner, statistics: UpdateStatistics | None) -> HiddenLoss:
        """The loss of a micro-batch: that of the responses in it, weighted as parts of the whole update.

        Gradients of the output weight go straight to its `main_grad`; Megatron's loss scale is 1 in float32 and
        bfloat16, so what backward hands in is 1.
        """
        layout = head_layout(learner, learner.recipe.rollout.temperature)

        def loss(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
            weight = model.output_weight()
            segments, tokens = select_responses(self.segments, batch.indices)
            found = fused_policy_loss(
                predicting(model, hidden, batch),
                weight,
                batch.targets,
                self.behaviour[tokens],
                self.advantages[batch.indices],
                segments,
                self.section,
                layout,
                statistics=statistics,
                reference=None if self.reference is None else self.reference[tokens],
                main_grad=weight.main_grad,  # type: ignore[attr-defined]  # Megatron's gradient buffer
            )
            return found.loss, torch.stack([found.logprobs, found.entropy])

        return loss


def make_objective(learner: Learner, samples: Sequence[Sample], advantages: np.ndarray) -> Objective:
    """The recipe's objective on one update's samples, with every denominator taken from the whole update."""
    recipe, device = learner.recipe, learner.ranks.device
    lengths = torch.tensor([len(sample.response_ids) for sample in samples], device=device)
    counted = None
    if recipe.objective.zero_variance == "mask":
        rewards, groups = np.array([s.reward for s in samples]), np.array([s.group for s in samples])
        counted = torch.from_numpy(informative(rewards, groups)).to(device)
    weights = response_weights(
        lengths, recipe.objective, constant_length=recipe.rollout.max_response_tokens, counted=counted
    )
    behaviour = _flat([sample.behaviour_logprobs for sample in samples], device)
    correction = None
    if recipe.objective.mismatch != "none":
        engine = _flat([s.engine_logprobs for s in samples if s.engine_logprobs is not None], device)
        correction = mismatch_correction(behaviour, engine, recipe.objective)
    return Objective(
        recipe.objective,
        behaviour,
        torch.from_numpy(np.asarray(advantages, dtype=np.float32)).to(device),
        make_segments(lengths, weights, correction),
        _reference(samples, recipe.objective, device),
    )


def _reference(samples: Sequence[Sample], section: ObjectiveSection, device: torch.device) -> torch.Tensor | None:
    if section.reference_every == 1:
        return None  # the reference is the current policy
    rows = [sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None]
    if len(rows) < len(samples):
        raise ValueError(
            f"objective.reference_every = {section.reference_every} needs every sample's reference_logprobs"
        )
    return _flat(rows, device)


def _flat(rows: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(rows).astype(np.float32)).to(device)
