"""Vocabulary and sequence parallelism on gloo ranks against one rank with all logits at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mugrpo_megatron.kernels.head import token_logprobs
from tests.kernels.problems import (
    OBJECTIVES,
    PADDED,
    SUPPORT_OBJECTIVES,
    TRIED,
    Answer,
    Problem,
    distance,
    errors,
    fused,
    layout_of,
    make_problem,
    materialised,
    support_of_problem,
    tolerance_of,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.process
CASES = {name: (OBJECTIVES[name], False) for name in TRIED}
CASES |= {f"{name}, of support ids": (config, True) for name, config in SUPPORT_OBJECTIVES.items()}


def vocabulary_parallel(dtype: torch.dtype) -> dict[str, float]:
    """Largest error of each objective over chunk sizes, every rank holding its rows of the weight."""
    rows = own_rows()
    worst: dict[str, float] = {}
    for name, (config, masked) in CASES.items():
        problem = make_problem(config, dtype=dtype)
        support_ids = support_of_problem(problem) if masked else None
        expected = materialised(problem, support_ids)
        expected = replace(expected, d_weight=expected.d_weight[rows])
        for chunk in (5, 1000):
            apart = errors(on_rank(problem, rows, chunk, support_ids), expected)
            worst[name] = max(*apart.values(), worst.get(name, 0.0))
    return worst


def sequence_parallel() -> float:
    """Error of the hidden gradient where each rank holds a slice of the tokens and the sum is scattered over them."""
    problem = make_problem(OBJECTIVES["mu_grpo"], lengths=(9, 0, 1, 20, 14))
    rank, world = dist.get_rank(), dist.get_world_size()
    share = len(problem.targets) // world
    mine = slice(rank * share, (rank + 1) * share)
    parts = [torch.empty_like(problem.hidden[mine]) for _ in range(world)]
    dist.all_gather(parts, problem.hidden[mine].contiguous())
    result = on_rank(replace(problem, hidden=torch.cat(parts)), own_rows(), 7).d_hidden[mine]
    return distance(result, materialised(problem).d_hidden[mine])


def logprobs() -> tuple[list[float], float]:
    """This rank's log-probabilities, and their error."""
    problem = make_problem(OBJECTIVES["mu_grpo"])
    layout = layout_of(7, tp_group=dist.group.WORLD)
    result, _ = token_logprobs(problem.hidden, problem.weight[own_rows()], problem.targets, layout)
    return result.tolist(), distance(result, materialised(problem).logprobs)


def own_rows() -> slice:
    """The rows of the padded weight that this rank holds."""
    share = PADDED // dist.get_world_size()
    return slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)


def on_rank(problem: Problem, rows: slice, chunk: int, support_ids: torch.Tensor | None = None) -> Answer:
    """The fused loss; the hidden gradient summed over the ranks, as the learner's gather does."""
    mine = replace(problem, weight=problem.weight[rows])
    result = fused(mine, layout_of(chunk, tp_group=dist.group.WORLD), support_ids=support_ids)
    d_hidden = result.d_hidden.float()
    dist.all_reduce(d_hidden)
    return replace(result, d_hidden=d_hidden)


@pytest.mark.parametrize(("world", "dtype"), [(4, torch.float32), (2, torch.bfloat16)])
def test_vocabulary_parallel(world: int, dtype: torch.dtype) -> None:
    for worst in run_ranks(world, vocabulary_parallel, dtype):
        for name, (config, masked) in CASES.items():
            tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5 if masked else tolerance_of(config)
            assert worst[name] < tolerance, name


def test_sequence_parallel() -> None:
    assert max(run_ranks(2, sequence_parallel)) < 1e-6


def test_ranks_agree_on_log_probabilities_to_the_bit() -> None:
    (first, error), *others = run_ranks(4, logprobs)
    assert error < 1e-6
    assert all(values == first for values, _ in others)
