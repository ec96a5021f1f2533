"""One optimizer update of the policy, and log-probabilities without an update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.statistics import UpdateStatistics, update_statistics
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.groups import named_phase
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.loss import Objective, TokenLoss, from_token_loss, make_objective
from mugrpo_megatron.learner.optimizer import Step, learning_rate, loss_scale, take_step
from mugrpo_megatron.learner.packing import MicroBatch, TokenSequence, sequence_of
from mugrpo_megatron.learner.passes import (
    forward_backward,
    gather_tokens,
    logprobs_and_entropies,
    pack_share,
    plan_update,
)
from mugrpo_megatron.learner.routing import gather_flips, gather_routes
from mugrpo_megatron.samples import Sample


def update(
    learner: Learner, samples: Sequence[Sample], advantages: np.ndarray, stage_progress: float = 0.0
) -> dict[str, float]:
    """Take one optimizer update on `samples` with `advantages` float [N].

    `stage_progress` is the part of the stage's updates that are taken, for a learning rate that falls with it.
    Collective: every rank passes the whole update and trains on its own share. Returns, on every rank, the objective's
    metrics over the whole update under the weights before the step, and `grad_norm` (before clipping), `lr`, `tokens`
    (trained), `packed_efficiency`, `skipped` (1 when a non-finite gradient left the weights as they were), `seconds`.
    """
    started = time.perf_counter()
    with named_phase(learner.ranks, f"update {learner.updates_done}"):
        sequences = _sequences(learner, samples)
        plan = plan_update(learner, sequences)
        batches = pack_share(learner, sequences, plan)
        objective = make_objective(learner, samples, advantages)
        statistics = _statistics(learner, objective, sequences, batches)
        values = forward_backward(learner, batches, objective.loss(learner, statistics))
        scale = loss_scale(learner.optimizer)
        step = _step(learner, stage_progress)
        logprobs, entropy = gather_tokens(learner, sequences, batches, values, k=2)
        flips = _flips(learner, sequences, batches)
    with torch.no_grad():
        loss, metrics = policy_loss(
            logprobs,
            objective.behaviour,
            objective.advantages,
            objective.segments,
            objective.section,
            proximal=objective.proximal,
            ref=objective.ref,
            entropy=entropy,
        )
    metrics["loss"] = float(loss)
    if len(entropy):
        metrics["entropy"] = float(entropy.mean())
    metrics |= _step_metrics(learner, step, scale)
    metrics |= {"tokens": float(len(logprobs)), "packed_efficiency": plan.efficiency}
    metrics |= flips
    metrics["seconds"] = time.perf_counter() - started
    return metrics


def _sequences(learner: Learner, samples: Sequence[Sample]) -> list[TokenSequence]:
    """The samples to train on; UserError for a token that the model lacks, as a stage from elsewhere may hold."""
    sequences = [sequence_of(sample, masked=True) for sample in samples]
    parts = [part for one in sequences for part in (one.ids, one.support_ids) if part is not None]
    largest = max(int(part.max(initial=0)) for part in parts)
    if largest >= learner.architecture.vocab_size:
        raise UserError(
            f"the responses have token {largest}, and the model has {learner.architecture.vocab_size} tokens: the "
            "stage is of another model, or damaged; take the model that sampled it"
        )
    return sequences


def _step_metrics(learner: Learner, step: Step, scale: float) -> dict[str, float]:
    """The metrics of an optimizer step; `scale` is the loss scale before it, which float16 alone has."""
    metrics = {"grad_norm": step.grad_norm, "lr": step.lr, "skipped": float(step.skipped and not step.overflowed)}
    if learner.recipe.model.dtype == "float16":
        metrics |= {"overflowed": float(step.overflowed), "loss_scale": scale}
    return metrics


def optimize(learner: Learner, sequences: Sequence[TokenSequence], token_loss: TokenLoss) -> Step:
    """One optimizer update on any token loss at temperature 1, as for supervised learning. Collective."""
    batches = pack_share(learner, sequences, plan_update(learner, sequences))
    forward_backward(learner, batches, from_token_loss(learner, token_loss, temperature=1.0))
    return _step(learner)


def token_logprobs(learner: Learner, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Log-probabilities float32 [R] of every response under the current weights at the rollout's temperature.

    Collective; every rank gets all. Packs `samples` as `update` does: for the samples of one update the values are
    bitwise those that `update` computes, so its importance ratios are exactly 1. Tokens outside a loss mask get 0.
    """
    return _scored(learner, samples)[0]


def _scored(
    learner: Learner, samples: Sequence[Sample], record_routes: bool = False
) -> tuple[list[np.ndarray], list[TokenSequence], list[MicroBatch]]:
    """`token_logprobs`, and the sequences and micro-batches of the pass."""
    with named_phase(learner.ranks, "learner log-probabilities"):
        sequences = _sequences(learner, samples)
        batches = pack_share(learner, sequences, plan_update(learner, sequences), record_routes)
        values = logprobs_and_entropies(learner, batches, learner.recipe.rollout.temperature)
        logprobs = gather_tokens(learner, sequences, batches, values, k=2)[0].cpu()
    parts = [part.numpy() for part in logprobs.split([sequence.trained for sequence in sequences])]
    responses = []
    for part, sample in zip(parts, samples, strict=True):
        if sample.loss_mask is not None:
            whole = np.zeros(len(sample.response_ids), dtype=np.float32)
            whole[sample.loss_mask] = part
            part = whole
        responses.append(part)
    return responses, sequences, batches


def record_routes(learner: Learner, samples: Sequence[Sample]) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
    """`token_logprobs`, and the experts that the routers chose on the way, layer by layer.

    Each layer's are uint8 or uint16 [T, k] for all tokens but the last of every sample, in the order of the samples.
    Collective, every layer of the iterator too. A pass that replays these routes computes the same values bitwise.
    """
    logprobs, sequences, batches = _scored(learner, samples, record_routes=True)
    parts = [batch.routing for batch in batches if batch.routing]
    layers = gather_routes(parts, _routed_tokens(sequences), learner.architecture.layers, learner.routed, learner.ranks)
    return logprobs, layers


def _flips(learner: Learner, sequences: Sequence[TokenSequence], batches: list[MicroBatch]) -> dict[str, float]:
    """How far the routers have moved from the routes that the update replayed; empty without replay."""
    if not any(sequence.routes for sequence in sequences):
        return {}
    parts = [batch.routing for batch in batches if batch.routing]
    layers = learner.architecture.layers - learner.architecture.dense_layers
    return gather_flips(parts, _routed_tokens(sequences), layers, learner.ranks)


def _routed_tokens(sequences: Sequence[TokenSequence]) -> int:
    return sum(len(sequence.ids) - 1 for sequence in sequences)


def _statistics(
    learner: Learner, objective: Objective, sequences: list[TokenSequence], batches: list[MicroBatch]
) -> UpdateStatistics | None:
    """Statistics of the whole update that the objective needs before any gradient, from a forward pass, or None."""
    if not objective.section.needs_statistics:
        return None
    values = logprobs_and_entropies(learner, batches, learner.recipe.rollout.temperature)
    logprobs = gather_tokens(learner, sequences, batches, values, k=2)[0]
    return update_statistics(logprobs, objective.behaviour, objective.advantages, objective.segments, objective.section)


def _step(learner: Learner, stage_progress: float = 0.0) -> Step:
    section, total = learner.recipe.optimizer, learner.recipe.schedule.total_updates
    rate = learning_rate(section, learner.updates_done, total, stage_progress)
    step = take_step(learner.optimizer, rate, section.clip_grad)
    learner.updates_done += 1
    learner.steps_done += not step.skipped
    if not step.overflowed:
        learner.skipped_in_a_row = learner.skipped_in_a_row + 1 if step.skipped else 0
    return step
