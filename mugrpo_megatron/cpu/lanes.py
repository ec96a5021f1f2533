"""Several micro-batches at once on CPU, each in a thread of its own.

A small model's update is many operations of less than a millisecond. Sharing each of them among the cores means waking
the other cores as often; on a busy machine every operation also waits for its slowest thread. So each thread takes a
whole micro-batch, forward and backward, alone. It returns the gradients of its micro-batch instead of accumulating
them, and they are added in the order of the micro-batches: the sum does not depend on which thread was faster.

Only where micro-batches are independent computations of one process: without tensor, pipeline and context parallelism,
experts and recomputation, whose state Megatron keeps for one micro-batch at a time. Megatron's schedule runs the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.model import PolicyModel, parameters, policy
from mugrpo_megatron.learner.packing import MicroBatch

Read = Callable[[PolicyModel, torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor]]
"""(model, hidden states, micro-batch) -> its loss and what the pass returns of it."""
Found = tuple[torch.Tensor, Sequence[torch.Tensor | None]]
"""What a micro-batch returns, and its gradients by parameter."""

MOST_LANES = 4
"""Python runs in one thread at a time, so more lanes would wait for each other; measured with two."""
LANES_FROM = 1024
"""Tokens of a rank's update from which it is split for lanes. On two cores 900 to 5,000 tokens took 15 to 40 % less
time in two lanes than as one micro-batch whose operations two threads share."""
LANE_TOKENS = 4096
"""Most tokens of a lane's micro-batch, unless one response is longer: measured with a model of 0.8M parameters, whose
activations of 8,192 are out of the cache again before the backward pass reads them."""
MOST_PARAMETERS = 64 * 2**20
"""Each lane has gradients of its own; larger models keep the cores busy within each operation."""


def lanes(learner: Learner) -> int:
    """How many micro-batches a rank runs at once, the same on every rank: the packing of an update depends on it.

    1 where Megatron's schedule runs them.
    """
    ranks, recipe = learner.ranks, learner.recipe
    together = max(ranks.tp_size, ranks.pp_size, ranks.cp_size) > 1
    stateful = bool(learner.architecture.experts) or recipe.learner.recompute != "none"
    scaled = recipe.model.dtype == "float16"
    if ranks.device.type != "cpu" or together or stateful or scaled or parameters(learner.chunks) > MOST_PARAMETERS:
        return 1
    return min(ranks.threads, MOST_LANES)


def run_lanes(learner: Learner, batches: list[MicroBatch], read: Read, forward_only: bool) -> list[torch.Tensor]:
    """What `read` returns of every micro-batch; accumulates gradients unless `forward_only`.

    As Megatron's schedule does without pipeline stages, and like it reduces the gradients over data parallel ranks.
    """
    chunk = learner.chunks[0]
    weights = [parameter for parameter in chunk.parameters() if parameter.requires_grad]

    def take(batch: MicroBatch) -> Found:
        with torch.set_grad_enabled(not forward_only):
            hidden = chunk(batch.ids, batch.positions, attention_mask=None, packed_seq_params=batch.packing)
            loss, found = read(policy(chunk), hidden, batch)
            return found, [] if forward_only else torch.autograd.grad(loss, weights, allow_unused=True)

    values = []
    for found, gradients in _in_order(take, batches, lanes(learner)):
        values.append(found)
        _accumulate(weights, gradients)
    if not forward_only:
        chunk.config.finalize_model_grads_func([chunk], None)
    return values


def _in_order(take: Callable[[MicroBatch], Found], batches: list[MicroBatch], threads: int) -> Iterator[Found]:
    """`take` of each micro-batch, in threads that run every operation alone."""
    pool = ThreadPoolExecutor(threads, "lane", initializer=torch.set_num_threads, initargs=(1,))
    try:
        waiting: list[Future[Found]] = [pool.submit(take, batch) for batch in batches]
        while waiting:
            yield waiting.pop(0).result()
    finally:
        pool.shutdown(cancel_futures=True)


@torch.no_grad()
def _accumulate(weights: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add gradients to Megatron's buffers, as its hooks do in a backward pass."""
    for weight, gradient in zip(weights, gradients, strict=False):
        if gradient is not None:
            weight.main_grad.add_(gradient)  # type: ignore[attr-defined]
