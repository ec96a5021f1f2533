"""Micro-batches that run at once learn what they learn one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.packing import TokenSequence, sequence_of
from mugrpo_megatron.learner.passes import plan_update
from mugrpo_megatron.learner.update import optimize, update
from tests.learner.tiny import advantages, recipe, samples, save_model
from tests.ranks import run_ranks

METRICS = ("loss", "grad_norm", "entropy", "ratio_neg_p50", "tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


def taken(model: str, sections: dict[str, Any]) -> tuple[int, list[list[float]], np.ndarray]:
    """How many micro-batches run at once, the metrics of three updates and a supervised one, the weights after them."""
    learner = build_learner(recipe(Path(model), **sections))
    data = samples()
    result = [update(learner, data, advantages(len(data))) for _ in range(3)]
    step = optimize(learner, [sequence_of(sample) for sample in data], lambda logprobs, batch: -logprobs.sum() / 100)
    weights = torch.cat([parameter.detach().flatten() for parameter in policy(learner.chunks[0]).parameters()])
    rows = [[metrics[name] for name in METRICS] for metrics in result]
    return learner.lanes, [*rows, [step.grad_norm]], weights.float().numpy()


@pytest.mark.process
@pytest.mark.parametrize("sections", [{"objective": {"name": "m2po"}}, {"model": {"dtype": "bfloat16"}}])
def test_updates_are_those_of_one_thread(model: str, sections: dict[str, Any]) -> None:
    [(single, alone, weights)] = run_ranks(1, taken, model, sections)
    [(several, first, moved)] = run_ranks(1, taken, model, {**sections, "learner": {"threads": 3}})
    exact = sections.get("model", {}).get("dtype") != "bfloat16"
    assert (single, several) == (1, 3)
    for sequence, other in zip(alone, first, strict=True):
        assert other == pytest.approx(sequence, rel=1e-4 if exact else 0.03, abs=1e-6 if exact else 0.01)
    np.testing.assert_allclose(moved, weights, atol=1e-4 if exact else 0.02)


@pytest.mark.process
def test_it_does_not_matter_which_thread_is_faster(model: str) -> None:
    runs = [run_ranks(1, taken, model, {"learner": {"threads": 3}})[0] for _ in range(2)]
    assert runs[0][:2] == runs[1][:2]
    assert (runs[0][2] == runs[1][2]).all()


@pytest.mark.process
def test_data_parallel_ranks_add_what_their_lanes_found(model: str) -> None:
    [(_, alone, weights)] = run_ranks(1, taken, model, {})
    for several, rows, moved in run_ranks(2, taken, model, {"learner": {"threads": 2}}):
        assert several == 2
        for sequence, other in zip(alone[:3], rows[:3], strict=True):
            assert other == pytest.approx(sequence, rel=1e-4, abs=1e-6)
        assert moved.shape == weights.shape


def with_unequal_threads(model: str) -> tuple[dict[str, float], list[list[list[int]]]]:
    """An update where each rank has one thread more than the one before, and the plan that the rank made for it."""
    learner = build_learner(recipe(Path(model), learner={"threads": 1 + dist.get_rank(), "micro_batch_tokens": 4096}))
    data = samples(16, 8)
    plan = plan_update(learner, [sequence_of(sample) for sample in data])
    return update(learner, data, advantages(len(data))), plan.micro_batches


@pytest.mark.process
def test_ranks_of_unequal_size_train_each_response_once(model: str) -> None:
    [(alone, _)] = run_ranks(1, with_unequal_threads, model)
    (first, plan), (second, other) = run_ranks(2, with_unequal_threads, model)
    assert plan == other
    for name in METRICS:
        assert first[name] == second[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)


def at_once(model: str, sections: dict[str, Any]) -> int:
    return build_learner(recipe(Path(model), **sections)).lanes


@pytest.mark.process
@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (1, {"learner": {"threads": 2, "recompute": "full"}}),
        (2, {"learner": {"threads": 2}, "parallel": {"tensor": 2}}),
    ],
)
def test_megatrons_schedule_runs_what_shares_state(model: str, world: int, sections: dict[str, Any]) -> None:
    assert set(run_ranks(world, at_once, model, sections)) == {1}


def row_lengths(model: str, threads: int, responses: list[int]) -> list[int]:
    """Tokens of a micro-batch of updates of so many responses of 100 tokens."""
    learner = build_learner(recipe(Path(model), learner={"threads": threads, "micro_batch_tokens": 16384}))
    sequence = TokenSequence(np.zeros(100, dtype=np.int32), 99)
    return [plan_update(learner, [sequence] * count).length for count in responses]


@pytest.mark.process
def test_a_lane_gets_rows_that_stay_in_the_cache(model: str) -> None:
    assert run_ranks(1, row_lengths, model, 1, [150]) == [[3_800]]
    assert run_ranks(1, row_lengths, model, 2, [150, 82, 80, 12, 10]) == [[3_800, 2_100, 4_000, 600, 1_000]]
