"""Forward and backward passes of an update through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from mugrpo_megatron.cpu.megatron import LANES_FROM, run_lanes
from mugrpo_megatron.learner.groups import Ranks
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.loss import HiddenLoss, logprobs_and_entropy
from mugrpo_megatron.learner.model import PolicyModel, policy
from mugrpo_megatron.learner.packing import MicroBatch, PackingPlan, TokenSequence, pack, plan
from mugrpo_megatron.learner.routing import Routing, clear, layers_of, make_routing
from mugrpo_megatron.recipe.systems import FP8_MULTIPLE, cpu_row_tokens

Read = Callable[[PolicyModel, torch.Tensor, MicroBatch], torch.Tensor]
"""(last chunk's model, its hidden states, micro-batch) -> float32 [k, T]: k values for each trained token."""


def plan_update(learner: Learner, sequences: Sequence[TokenSequence]) -> PackingPlan:
    """Plan the micro-batches of an update; the plan is the same on every rank and in every pass over the sequences."""
    ranks, recipe = learner.ranks, learner.recipe
    lengths = [len(s.ids) for s in sequences]
    lanes = learner.lanes if sum(lengths) >= LANES_FROM * ranks.dp_size else 1
    row = -(-recipe.learner.micro_batch_tokens // lanes)
    if ranks.device.type == "cpu":
        row = min(row, cpu_row_tokens(learner.architecture.layers, learner.architecture.letters["H"]))
    return plan(
        lengths,
        ranks.dp_size,
        row,
        multiple=row_multiple(recipe.learner.fp8, ranks),
        count_multiple=ranks.pp_size if recipe.parallel.virtual_pipeline > 1 else lanes,
    )


def row_multiple(fp8: str, ranks: Ranks) -> int:
    """The number by which the length of every packed row must be divisible.

    Every rank then gets an equal shard of the row, and in fp8 each shard has whole blocks.
    """
    shards = ranks.tp_size * (2 * ranks.cp_size if ranks.cp_size > 1 else 1)
    return shards * FP8_MULTIPLE[fp8]


def pack_local(
    learner: Learner, sequences: Sequence[TokenSequence], plan: PackingPlan, record_routes: bool = False
) -> list[MicroBatch]:
    """Pack this rank's data parallel share of the sequences into micro-batches, on its device.

    The routers replay the sequences' routes, if there are any. With `record_routes` they choose, and each micro-batch's
    `Routing.recorded` keeps their choices.
    """
    ranks = learner.ranks
    local = plan.micro_batches[ranks.dp]
    batches = [pack(sequences, indices, plan.length, ranks.device, ranks.cp, ranks.cp_size) for indices in local]
    if not record_routes and not any(sequence.routes for sequence in sequences):
        return batches
    return [
        replace(batch, routing=_routing(learner, sequences, indices, plan.length, record_routes))
        for batch, indices in zip(batches, local, strict=True)
    ]


def _routing(
    learner: Learner, sequences: Sequence[TokenSequence], indices: list[int], length: int, record: bool
) -> Routing:
    """The experts that the packed row of the sequences at `indices` replays or records."""
    lengths = np.array([len(sequence.ids) for sequence in sequences])
    starts, rows = np.cumsum(lengths - 1) - (lengths - 1), np.cumsum(lengths[indices]) - lengths[indices]
    packed = [(int(row), len(sequences[i].ids), sequences[i].routes) for row, i in zip(rows, indices, strict=True)]
    layers = sorted(layer for chunk in learner.chunks for layer in layers_of(chunk))
    return make_routing(packed, starts[indices].tolist(), length, layers, learner.routed, learner.ranks, record)


def forward_backward(learner: Learner, batches: list[MicroBatch], loss: HiddenLoss) -> list[torch.Tensor]:
    """Compute an update's gradients: those of `loss`, summed over all micro-batches of all data parallel ranks.

    Returns what `loss` returns beside the loss (for an objective, log-probabilities and entropies, float32 [2, T]) for
    each micro-batch on the last pipeline stage, and [] on others.
    """
    for chunk in learner.chunks:
        chunk.zero_grad_buffer()
    learner.optimizer.zero_grad()
    return _run(learner, batches, loss, forward_only=False)


def logprobs_and_entropies(learner: Learner, batches: list[MicroBatch], temperature: float) -> list[torch.Tensor]:
    """Compute log-probability and entropy, float32 [2, T], of each micro-batch's trained tokens, without gradients.

    They are bitwise equal to those of `forward_backward` on the same micro-batches and weights. All pipeline stages but
    the last return [].
    """

    def read(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return torch.stack(logprobs_and_entropy(learner, model, hidden, batch, temperature))

    return forward_only(learner, batches, read)


def forward_only(learner: Learner, batches: list[MicroBatch], read: Read) -> list[torch.Tensor]:
    """Run the model forward, without gradients, and return what `read` makes of each micro-batch's hidden states.

    All pipeline stages but the last return [].
    """

    def without_loss(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden.new_zeros(()), read(model, hidden, batch)

    with torch.no_grad():
        return _run(learner, batches, without_loss, forward_only=True)


def gather_tokens(
    learner: Learner, sequences: Sequence[TokenSequence], batches: list[MicroBatch], values: list[torch.Tensor], k: int
) -> torch.Tensor:
    """Gather the micro-batches' `values`, k for each trained token, from all ranks.

    Returns float32 [k, T] on every rank, for the update's T trained tokens in the order of `sequences`. Collective.
    """
    device = learner.ranks.device
    lengths = torch.tensor([s.trained for s in sequences], device=device)
    starts = (lengths.cumsum(0) - lengths).tolist()
    table = torch.zeros(k, int(lengths.sum()), device=device)
    if learner.ranks.owns_tokens:
        for batch, rows in zip(batches, values, strict=True):
            for index, columns in zip(batch.indices, rows.split(batch.lengths.tolist(), dim=1), strict=True):
                table[:, starts[index] : starts[index] + columns.shape[1]] = columns
    # One rank contributes each token and the others zeros, so the sum is exact.
    if learner.ranks.world > 1:
        dist.all_reduce(table)
    return table


def _run(learner: Learner, batches: list[MicroBatch], read: Any, forward_only: bool) -> list[torch.Tensor]:
    if learner.lanes > 1 and len(batches) > 1:
        chunk = learner.chunks[0]
        return run_lanes(chunk, batches, lambda batch: _in_lane(read, batch, chunk), learner.lanes, forward_only)
    iterators = [iter(batches) for _ in learner.chunks]
    values: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, read, learner.recipe.learner.recompute == "full" and not forward_only),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=learner.chunks if len(learner.chunks) > 1 else learner.chunks[0],
        num_microbatches=len(batches),
        seq_length=batches[0].ids.shape[1] * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if batches[0].routing:
        clear(learner.chunks)
    return values


def _in_lane(read: Any, batch: MicroBatch, chunk: DistributedDataParallel) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = chunk(batch.ids, batch.positions, attention_mask=None, packed_seq_params=batch.packing)
    return read(policy(chunk), hidden, batch)  # type: ignore[no-any-return]


def _forward_step(
    read: Any, recomputes: bool, batches: Iterator[MicroBatch], chunk: DistributedDataParallel
) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    if batch.routing:
        batch.routing.begin(chunk)
    hidden = chunk(batch.ids, batch.positions, attention_mask=None, packed_seq_params=batch.packing)
    if batch.routing:
        batch.routing.end(chunk, recomputes)

    def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        value, tokens = read(policy(chunk), hidden, batch)
        # Megatron sums token counts for finalize_model_grads_func, which here ignores them (learner._reduce_gradients).
        token_count = torch.zeros((), dtype=torch.int, device=value.device)
        return value, token_count, tokens

    return hidden, loss
