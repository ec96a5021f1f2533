"""What one rank does in the tests of vocabulary and sequence parallelism, and what it found."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from mugrpo_megatron.kernels.fused_loss import fused_policy_loss
from mugrpo_megatron.kernels.head import HeadLayout
from mugrpo_megatron.kernels.linear_logprob import token_logprobs
from tests.kernels.problems import (
    OBJECTIVES,
    PADDED,
    TEMPERATURE,
    VOCAB,
    Answer,
    Problem,
    distance,
    gradient,
    loss_error,
    make_problem,
    materialised,
)

CHUNKS = (1, 5, 16, 1000)


def errors(found: Answer, expected: Answer) -> dict[str, float]:
    return {"loss": loss_error(found.loss, expected.loss)} | {
        name: distance(getattr(found, name), getattr(expected, name))
        for name in ("logprobs", "entropy", "d_hidden", "d_weight")
    }


def vocabulary_parallel(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Largest error of each objective over chunk sizes, every rank holding its rows of the weight."""
    group = everyone()
    rows = own_rows()
    worst: dict[str, dict[str, float]] = {}
    for name, config in OBJECTIVES.items():
        problem = make_problem(config, dtype=dtype)
        expected = materialised(problem)
        expected = replace(expected, d_weight=expected.d_weight[rows])
        for chunk in CHUNKS:
            found = errors(_fused(_shard(problem, rows), chunk, group), expected)
            worst[name] = {key: max(value, worst.get(name, {}).get(key, 0.0)) for key, value in found.items()}
    return worst


def sequence_parallel() -> float:
    """Error of the hidden gradient where each rank holds a slice of the tokens and the sum is scattered over them."""
    problem = make_problem(OBJECTIVES["mu_grpo"], lengths=(9, 0, 1, 20, 14))
    rows = own_rows()
    rank, world = dist.get_rank(), dist.get_world_size()
    share = len(problem.targets) // world
    mine = slice(rank * share, (rank + 1) * share)
    parts = [torch.empty_like(problem.hidden[mine]) for _ in range(world)]
    dist.all_gather(parts, problem.hidden[mine].contiguous())
    gathered = replace(_shard(problem, rows), hidden=torch.cat(parts))
    found = _fused(gathered, 7, everyone()).d_hidden[mine]
    return distance(found, materialised(problem).d_hidden[mine])


def logprobs() -> tuple[list[float], float]:
    """This rank's log-probabilities, and their error."""
    problem = make_problem(OBJECTIVES["mu_grpo"])
    rows = own_rows()
    found, _ = token_logprobs(
        problem.hidden, problem.weight[rows], problem.targets, HeadLayout(VOCAB, TEMPERATURE, everyone(), 7)
    )
    return found.tolist(), distance(found, materialised(problem).logprobs)


def everyone() -> dist.ProcessGroup:
    """All ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def own_rows() -> slice:
    """The rows of the padded weight that this rank holds."""
    share = PADDED // dist.get_world_size()
    return slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)


def _shard(problem: Problem, rows: slice) -> Problem:
    return replace(problem, weight=problem.weight[rows])


def _fused(problem: Problem, chunk: int, group: dist.ProcessGroup) -> Answer:
    """The fused loss; the hidden gradient summed over the ranks, as the learner's gather does."""
    leaves = problem.leaves()
    found = fused_policy_loss(
        leaves.hidden,
        leaves.weight,
        leaves.targets,
        leaves.behaviour,
        leaves.advantages,
        leaves.segments,
        leaves.config,
        HeadLayout(VOCAB, TEMPERATURE, group, chunk),
        statistics=leaves.statistics,
        reference=leaves.reference,
        anchor=leaves.anchor,
    )
    found.loss.backward()
    d_hidden = gradient(leaves.hidden).float()
    dist.all_reduce(d_hidden)
    return Answer(found.loss.detach(), found.logprobs, found.entropy, d_hidden, gradient(leaves.weight))
