"""Routing replay: routers choose what was recorded, in every layout, and their weights still learn from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.learner.packing import sequence_of
from mugrpo_megatron.learner.passes import forward_only, pack_local, plan_update
from mugrpo_megatron.learner.routing import LayerRoutes, layers_of
from mugrpo_megatron.learner.update import record_routes, token_logprobs, update
from mugrpo_megatron.samples import InMemoryRoutes, Sample
from tests import models
from tests.learner.tiny import VOCAB, advantages, recipe, samples
from tests.ranks import run_ranks

LAYERS, EXPERTS, CHOSEN = 4, 4, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16},
    "deepseek_v3": {"n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "n_group": 2, "topk_group": 1},
}


def with_routes(data: list[Sample], table: np.ndarray) -> list[Sample]:
    """The samples with their parts of the routes [L, T, k] of all."""
    ends = np.cumsum([sample.tokens - 1 for sample in data])
    arrays = np.split(table, ends[:-1], axis=1)
    return [replace(sample, routes=InMemoryRoutes(rows)) for sample, rows in zip(data, arrays, strict=True)]


def used_experts(learner: Learner, data: list[Sample]) -> np.ndarray:
    """bool [L, T, E]: what this rank's routers sent where in a pass over the samples; see them from outside."""
    seen: list[tuple[int, torch.Tensor]] = []
    for chunk in learner.chunks:
        for layer in policy(chunk).decoder.layers:
            number = layer.layer_number - 1
            if number < learner.architecture.dense_layers:
                continue
            assert isinstance(layer.mlp, MoELayer)
            layer.mlp.router.register_forward_hook(
                lambda module, inputs, output, number=number: seen.append((number, output[1]))
            )
    sequences = [sequence_of(sample) for sample in data]
    batches = pack_local(learner, sequences, plan_update(learner, sequences))
    forward_only(learner, batches, lambda model, hidden, batch: hidden)
    result = np.zeros((LAYERS, sum(sample.tokens - 1 for sample in data), EXPERTS), dtype=bool)
    for number in {number for number, _ in seen}:
        maps = [routed for layer, routed in seen if layer == number]
        for routed, batch in zip(maps, batches, strict=True):
            assert batch.routing
            assert (routed.sum(-1) == CHOSEN).all(), "every row, padding included, has as many experts"
            real = batch.routing.indices >= 0
            result[number, batch.routing.indices[real].numpy()] = routed[real].numpy()
    return result


def one_hot(table: np.ndarray) -> np.ndarray:
    return np.eye(EXPERTS, dtype=bool)[table].any(-2)


def replayed(model: str, sections: dict[str, dict[str, Any]], table: np.ndarray | None) -> dict[str, Any]:
    """`replay` of a new learner of the model."""
    sections = {**sections, "learner": {**sections.get("learner", {}), "routing_replay": "learner"}}
    return replay(build_learner(recipe(Path(model), **sections)), table)


def replay(learner: Learner, table: np.ndarray | None) -> dict[str, Any]:
    """Record, take two updates that replay `table` (or what was recorded), and tell what happened."""
    data = samples()
    logprobs, layers = record_routes(learner, data)
    recorded = np.stack(list(layers))
    table = recorded if table is None else table
    data = with_routes(data, table)
    again = token_logprobs(learner, data)
    data = [replace(sample, behaviour_logprobs=row) for sample, row in zip(data, again, strict=True)]
    first = update(learner, data, advantages(len(data)))
    second = update(learner, data, advantages(len(data)))
    left = [routes for chunk in learner.chunks for routes in layers_of(chunk).values()]
    assert not any(routes.replay_backward_list or routes.target_topk_idx is not None for routes in left)
    assert not RouterReplay.global_router_replay_instances
    assert all(np.isfinite(row).all() for row in token_logprobs(learner, samples())), "then routers choose again"
    return {
        "dense": learner.architecture.dense_layers,
        "own": recorded,
        "bitwise": all((one == other).all() for one, other in zip(logprobs, again, strict=True)),
        "updates": [first, second],
        "logprobs": np.concatenate(token_logprobs(learner, data)),
        "used": used_experts(learner, data),
    }


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.night)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("routing")
    family = request.param
    models.save_model(directory, family, vocab_size=VOCAB, num_hidden_layers=LAYERS, **FAMILIES[family])
    return str(directory)


@pytest.fixture(scope="module")
def alone(model: str) -> dict[str, Any]:
    return run_ranks(1, replayed, model, {}, None)[0]


@pytest.mark.process
def test_a_pass_replays_what_was_recorded(alone: dict[str, Any]) -> None:
    """Every token and layer; the ratio is exactly 1 before the first update, and the routers move after it."""
    assert alone["bitwise"], "the recording pass computed what a replaying one does"
    dense = alone["dense"]
    np.testing.assert_array_equal(alone["used"][dense:], one_hot(alone["own"])[dense:])
    first, second = alone["updates"]
    assert first["ratio_neg_min"] == first["ratio_neg_max"] == first["ratio_pos_max"] == 1.0
    assert first["routes_flipped"] == first["routes_flipped_tokens"] == 0.0
    assert 0.0 < second["routes_flipped"] <= second["routes_flipped_tokens"] < 1.0


LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "ep2": (2, {"parallel": {"expert": 2}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "full recompute": (1, {"learner": {"recompute": "full"}}),
    "one micro-batch": (1, {"learner": {"micro_batch_tokens": 4096}}),
}
RARE_LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "cp2": (2, {"parallel": {"context": 2}}),
    "vpp2 recompute": (
        2,
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "learner": {"recompute": "full"}},
    ),
    "pp2 ep2": (4, {"parallel": {"pipeline": 2, "expert": 2}}),
    "tp2 cp2": (4, {"parallel": {"tensor": 2, "context": 2}}),
}


@pytest.mark.process
@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.night) for name in RARE_LAYOUTS)])
def test_the_update_is_that_of_one_process(layout: str, model: str, alone: dict[str, Any]) -> None:
    world, sections = {**LAYOUTS, **RARE_LAYOUTS}[layout]
    table, dense = alone["own"], alone["dense"]
    ranks = run_ranks(world, replayed, model, sections, table)
    used = np.any([rank["used"] for rank in ranks], axis=0)
    np.testing.assert_array_equal(used[dense:], one_hot(table)[dense:], "the ranks used the routes they were given")
    for rank in ranks:
        same = (one_hot(rank["own"]) == one_hot(table)).all(-1)
        assert same.mean() > 0.99, "rounding flips a choice at most"
        np.testing.assert_array_equal(rank["own"], ranks[0]["own"])
        for mine, theirs in zip(rank["updates"], alone["updates"], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3)
            assert mine["routes_flipped"] == pytest.approx(theirs["routes_flipped"], abs=0.01)
            assert mine["routes_flipped_tokens"] == pytest.approx(theirs["routes_flipped_tokens"], abs=0.02)
        first = rank["updates"][0]
        assert first["ratio_neg_min"] == first["ratio_pos_max"] == 1.0
        np.testing.assert_allclose(rank["logprobs"], alone["logprobs"], atol=2e-3)


def gates(logits: torch.Tensor, experts: torch.Tensor, pre_softmax: bool) -> torch.Tensor:
    """[t, E] weights of the replayed experts through Megatron's router."""
    replay = LayerRoutes()
    replay.set_target_indices(experts)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    weights, chosen = topk_routing_with_score_function(
        logits, experts.shape[1], use_pre_softmax=pre_softmax, router_replay=replay
    )
    RouterReplay.clear_global_router_replay_instances()
    assert (chosen.nonzero()[:, 1].view(experts.shape) == experts.sort().values).all()
    recorded = replay.get_recorded_indices()
    assert recorded is not None
    torch.testing.assert_close(recorded.sort().values, logits.topk(experts.shape[1]).indices.sort().values)
    return weights


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_the_router_learns_through_the_replayed_experts(pre_softmax: bool) -> None:
    """Weights and gradient against a dense softmax under a mask."""
    torch.manual_seed(0)
    logits = torch.randn(7, 8, requires_grad=True)
    experts = torch.stack([torch.randperm(8)[:3] for _ in range(7)])
    slope = torch.randn(7, 8)
    mask = torch.zeros(7, 8, dtype=torch.bool).scatter(1, experts, True)

    def dense(logits: torch.Tensor) -> torch.Tensor:
        if pre_softmax:
            return logits.softmax(-1) * mask
        return logits.masked_fill(~mask, -torch.inf).softmax(-1)

    weights = gates(logits, experts, pre_softmax)
    torch.testing.assert_close(weights, dense(logits))
    (gradient,) = torch.autograd.grad((weights * slope).sum(), logits)
    exact = logits.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad((dense(exact) * slope).sum(), exact)
    torch.testing.assert_close(gradient.double(), wanted, atol=1e-6, rtol=1e-5)
    assert pre_softmax or (gradient[~mask] == 0).all(), "a router that is not chosen gets no gradient"
