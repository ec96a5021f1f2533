"""One optimizer update of the policy, and log-probabilities without an update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from mugrpo_megatron.algorithm.policy_loss import policy_loss
from mugrpo_megatron.algorithm.segments import LossInputs
from mugrpo_megatron.algorithm.statistics import UpdateStatistics, update_statistics
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.learner.groups import named_phase
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.loss import TokenLoss, from_token_loss, make_loss_inputs, objective_loss
from mugrpo_megatron.learner.optimizer import Step, learning_rate, loss_scale, take_step
from mugrpo_megatron.learner.packing import MicroBatch, TokenSequence, sequence_of
from mugrpo_megatron.learner.passes import (
    forward_backward,
    gather_tokens,
    logprobs_and_entropies,
    pack_local,
    plan_update,
)
from mugrpo_megatron.learner.routing import gather_flips, gather_routes
from mugrpo_megatron.samples import Sample


def update(
    learner: Learner, samples: Sequence[Sample], advantages: np.ndarray, stage_progress: float = 0.0
) -> dict[str, float]:
    """Take one optimizer update on `samples` with `advantages` float [N].

    `stage_progress` is the fraction of the stage's updates that are taken; with `optimizer.decay_over = "stage"` the
    learning rate depends on it.
    Collective: every rank passes the whole update and trains on its own share. Returns the update's metrics on every
    rank: those of the objective over the whole update, under the weights before the step, and `grad_norm` (before
    clipping), `lr`, `tokens` (trained), `packed_efficiency`, `skipped` (1 when a non-finite gradient left the weights
    as they were, unless it was an overflow in float16, which is counted in `overflowed`), `seconds`; in float16 also
    `loss_scale`, and where routes are replayed those of `gather_flips`.
    """
    started, recipe = time.perf_counter(), learner.recipe
    with named_phase(learner.ranks, f"update {learner.updates_done}"):
        if recipe.objective.has_user_advantage:
            advantages = _from_rank_0(learner, advantages)
        sequences = _sequences(learner, samples)
        plan = plan_update(learner, sequences)
        batches = pack_local(learner, sequences, plan)
        # Every rank builds the loss inputs of the whole update, so denominators need no communication.
        inputs = make_loss_inputs(
            recipe.objective, recipe.rollout.max_response_tokens, samples, advantages, learner.ranks.device
        )
        statistics = _statistics(learner, inputs, sequences, batches)
        values = forward_backward(learner, batches, objective_loss(learner, inputs, statistics))
        # The scale is read before the step, in which Megatron's scaler changes it if a float16 gradient overflowed.
        scale = loss_scale(learner.optimizer)
        logprobs, entropy = gather_tokens(learner, sequences, batches, values, k=2)
        step = _step(learner, stage_progress)
        flips = _flips(learner, sequences, batches)
    # Diagnostics come from the reference loss over the gathered tokens of all ranks, since quantiles need all tokens at
    # once.
    with torch.no_grad():
        loss, metrics = policy_loss(logprobs, inputs, entropy=entropy)
    metrics["loss"] = float(loss)
    if len(entropy):
        metrics["entropy"] = float(entropy.mean())
    metrics |= {"grad_norm": step.grad_norm, "lr": step.lr, "skipped": float(step.skipped and not step.overflowed)}
    if learner.recipe.model.dtype == "float16":
        metrics |= {"overflowed": float(step.overflowed), "loss_scale": scale}
    metrics |= {"tokens": float(len(logprobs)), "packed_efficiency": plan.efficiency}
    metrics |= flips
    metrics["seconds"] = time.perf_counter() - started
    return metrics


def _from_rank_0(learner: Learner, advantages: np.ndarray) -> np.ndarray:
    """Return the advantages float32 [N] of rank 0, on every rank. Collective."""
    if learner.ranks.world == 1:
        return advantages
    # A user's function may draw random numbers, and tensor parallel ranks with different losses would drift apart.
    column = torch.from_numpy(np.asarray(advantages, dtype=np.float32)).to(learner.ranks.device)
    dist.broadcast(column, 0)
    return np.asarray(column.cpu().numpy())


def _sequences(learner: Learner, samples: Sequence[Sample]) -> list[TokenSequence]:
    """The samples as sequences; UserError for a token id beyond the model's vocabulary."""
    sequences = [sequence_of(sample, masked=True) for sample in samples]
    ids = [array for sequence in sequences for array in (sequence.ids, sequence.support_ids) if array is not None]
    largest = max(int(array.max(initial=0)) for array in ids)
    # Checked here because on CUDA the embedding's kernel would end the process, and its message would name no token.
    if largest >= learner.architecture.vocab_size:
        raise UserError(
            f"the samples have token {largest}, and the model has {learner.architecture.vocab_size} tokens: the "
            "stage is of another model, or damaged; take the model that sampled the stage, or restore the stage from a "
            "copy"
        )
    return sequences


def optimize(learner: Learner, sequences: Sequence[TokenSequence], token_loss: TokenLoss) -> Step:
    """Take one optimizer update with `token_loss` of the log-probabilities at temperature 1. Collective.

    Supervised learning uses it.
    """
    batches = pack_local(learner, sequences, plan_update(learner, sequences))
    forward_backward(learner, batches, from_token_loss(learner, token_loss, temperature=1.0))
    return _step(learner)


def token_logprobs(learner: Learner, samples: Sequence[Sample], temperature: float | None = None) -> list[np.ndarray]:
    """Compute the log-probabilities float32 [R] of every response under the current weights.

    `temperature` is by default the rollout's. Collective; every rank gets all responses. `samples` are packed as in
    `update`: for the samples of one update the values are bitwise equal to `update`'s, so its importance ratios are
    exactly 1. Tokens outside a loss mask get 0.
    """
    return _logprobs(learner, samples, temperature=temperature)[0]


def _logprobs(
    learner: Learner, samples: Sequence[Sample], record_routes: bool = False, temperature: float | None = None
) -> tuple[list[np.ndarray], list[TokenSequence], list[MicroBatch]]:
    """Compute log-probabilities as `token_logprobs` does; returns also the sequences and micro-batches of the pass."""
    with named_phase(learner.ranks, "learner log-probabilities"):
        sequences = _sequences(learner, samples)
        batches = pack_local(learner, sequences, plan_update(learner, sequences), record_routes)
        values = logprobs_and_entropies(learner, batches, temperature or learner.recipe.rollout.temperature)
        logprobs = gather_tokens(learner, sequences, batches, values, k=2)[0].cpu()
    trained = [values.numpy() for values in logprobs.split([sequence.trained for sequence in sequences])]
    rows = [sample.scattered(values) for sample, values in zip(samples, trained, strict=True)]
    return rows, sequences, batches


def record_routes(learner: Learner, samples: Sequence[Sample]) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
    """Compute log-probabilities as `token_logprobs` does; returns also an iterator over the experts that were chosen.

    The iterator yields, for each layer, uint8 or uint16 [T, k]: the k experts of the T tokens of all samples, in order,
    without each sample's last token. This call is collective, and so is every step of the iterator. A pass that replays
    these routes gives the same values bitwise.
    """
    logprobs, sequences, batches = _logprobs(learner, samples, record_routes=True)
    routings = [batch.routing for batch in batches if batch.routing]
    tokens = _routed_tokens(sequences)
    return logprobs, gather_routes(routings, tokens, learner.architecture.layers, learner.routed, learner.ranks)


def _flips(learner: Learner, sequences: Sequence[TokenSequence], batches: list[MicroBatch]) -> dict[str, float]:
    """The metrics of `gather_flips`: how often the routers would now choose other experts than the replayed ones.

    An empty dict if no sequence has routes to replay.
    """
    if not any(sequence.routes for sequence in sequences):
        return {}
    routings = [batch.routing for batch in batches if batch.routing]
    layers = learner.architecture.layers - learner.architecture.dense_layers
    return gather_flips(routings, _routed_tokens(sequences), layers, learner.ranks)


def _routed_tokens(sequences: Sequence[TokenSequence]) -> int:
    # The last token of a sequence predicts nothing, so its experts are neither recorded nor replayed.
    return sum(len(sequence.ids) - 1 for sequence in sequences)


def _statistics(
    learner: Learner, inputs: LossInputs, sequences: list[TokenSequence], batches: list[MicroBatch]
) -> UpdateStatistics | None:
    """Compute the statistics of the whole update in a forward pass; None if the objective needs none."""
    if not inputs.config.needs_statistics:
        return None
    # M2PO's bound depends on all tokens of the update, so it must be known before the first micro-batch is trained on.
    values = logprobs_and_entropies(learner, batches, learner.recipe.rollout.temperature)
    logprobs = gather_tokens(learner, sequences, batches, values, k=2)[0]
    return update_statistics(logprobs, inputs)


def _step(learner: Learner, stage_progress: float = 0.0) -> Step:
    """Take one optimizer step at the learning rate of this update, and count it."""
    section, total = learner.recipe.optimizer, learner.recipe.schedule.total_updates
    rate = learning_rate(section, learner.updates_done, total, stage_progress)
    step = take_step(learner.optimizer, rate, section.clip_grad)
    # The schedule counts skipped updates, Adam's bias correction does not: its moments have not moved.
    learner.updates_done += 1
    learner.steps_done += not step.skipped
    # Several skipped updates in a row are a sign of failure. Overflows do not count, because float16's scaler finds its
    # scale by them.
    if not step.overflowed:
        learner.skipped_in_a_row = learner.skipped_in_a_row + 1 if step.skipped else 0
    return step
