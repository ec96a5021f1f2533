"""Collectives that fail say who, where and why; ranks without work take part all the same."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mugrpo_megatron.errors import CollectiveFailure, UserError
from mugrpo_megatron.learner.groups import CHATTER, initialize, named_phase
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.recipe.sections import RunSection
from mugrpo_megatron.recipe.systems import ParallelSection
from tests.learner.tiny import advantages, recipe, samples
from tests.ranks import run_ranks

pytestmark = pytest.mark.process


def left_alone() -> str:
    """Rank 0 waits for a collective that rank 1 never joins."""
    ranks = initialize(RunSection(), ParallelSection())
    group = dist.new_group()
    if ranks.rank == 1:
        return ""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)  # once both have met
    with pytest.raises(CollectiveFailure) as failure, named_phase(ranks, "update 7"):
        dist.all_reduce(torch.ones(1), group=group)
    return str(failure.value)


def test_a_collective_that_times_out_names_rank_phase_and_cause() -> None:
    message = run_ranks(2, left_alone)[0]
    assert message.startswith("rank 0 of 2 failed in update 7: another rank is stuck")


def test_of_a_librarys_message_the_reason_is_kept() -> None:
    said = "[/pytorch/third_party/gloo/pair.cc:538] Connection closed by peer [127.0.0.1]:1 This is typically a bug"
    assert CHATTER.sub("", said) == "Connection closed by peer [127.0.0.1]:1"


def too_wide() -> str:
    with pytest.raises(UserError) as error:
        initialize(RunSection(), ParallelSection(tensor=2))
    return str(error.value)


def test_a_layout_that_does_not_divide_the_world_is_refused() -> None:
    [message] = run_ranks(1, too_wide)
    assert "needs a multiple of 2 ranks but 1 run" in message


def refusal(model: str, sections: dict[str, dict[str, Any]]) -> str:
    with pytest.raises(UserError) as refused:
        build_learner(recipe(Path(model), **sections))
    return str(refused.value)


def test_what_gloo_cannot_gather_is_refused_on_cpu(routed: str) -> None:
    sections = {"parallel": {"tensor": 2, "expert": 2}}
    for said in run_ranks(4, refusal, routed, sections):
        assert "tensor 2 with expert 2 needs CUDA" in said


def one_sample(model: str) -> dict[str, float]:
    learner = build_learner(recipe(Path(model)))
    return update(learner, samples()[:1], advantages(1))


def test_a_rank_without_a_sequence_takes_part(model: str) -> None:
    [alone] = run_ranks(1, one_sample, model)
    for metrics in run_ranks(2, one_sample, model):
        assert metrics["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
        assert metrics["packed_efficiency"] == pytest.approx(0.5)


def two_updates(model: str, deterministic: bool) -> dict[str, Any]:
    learner = build_learner(recipe(Path(model), run={"deterministic": deterministic}))
    data = samples()
    metrics = [update(learner, data, advantages(len(data))) for _ in range(2)]
    trained = policy(learner.chunks[0])
    return {
        "torch": torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "variables": tuple(os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE")),
        "embedding": trained.embedding.word_embeddings.deterministic_mode,
        "figures": [
            (update_metrics["loss"], update_metrics["grad_norm"], update_metrics["ratio_neg_min"])
            for update_metrics in metrics
        ],
        "weights": [parameter.detach().numpy().copy() for parameter in trained.parameters()],
    }


def test_a_deterministic_learner(routed: str) -> None:
    """The flags are set in the rank's process, every operation has a fixed order, and it is the same update."""
    [one], [again] = run_ranks(1, two_updates, routed, True), run_ranks(1, two_updates, routed, True)
    assert (one["torch"], one["fills"], one["embedding"]) == (True, False, True)
    assert one["variables"] == (":4096:8", "0")
    assert one["figures"] == again["figures"]
    assert all((mine == theirs).all() for mine, theirs in zip(one["weights"], again["weights"], strict=True))
    [plain] = run_ranks(1, two_updates, routed, False)
    assert (plain["torch"], plain["embedding"]) == (False, False)
    for mine, theirs in zip(one["figures"], plain["figures"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
