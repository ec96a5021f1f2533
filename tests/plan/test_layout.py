"""Parameters of a rank: all ranks together hold the model, and nothing twice that should be once."""

from __future__ import annotations

import pytest

from mugrpo_megatron.plan.layout import Layout, held, layout_of, parameters, with_layout
from mugrpo_megatron.plan.memory import learner_state
from mugrpo_megatron.plan.models import bundled
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import architecture


def shape(name: str) -> Architecture:
    return architecture(bundled()[name])


def replicated(model: Architecture, layers: int) -> int:
    """Parameters that tensor parallelism does not split: norms, and a router."""
    size = model.letters
    of_layer = 2 * size["H"] + 2 * size["D"] * model.qk_layernorm + size["E"] * size["H"]
    return layers * of_layer + size["H"]


@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("name", ["Qwen2.5-Math-7B", "Qwen3-8B", "Llama-3.1-8B-Instruct"])
def test_ranks_together_hold_the_model(name: str, tensor: int, pipeline: int) -> None:
    model, layout = shape(name), Layout(tensor=tensor, pipeline=pipeline)
    together = sum(tensor * held(model, layout, stage).total for stage in range(pipeline))
    assert together == parameters(model) + (tensor - 1) * replicated(model, model.layers)


def test_a_tied_output_layer_is_a_copy_only_on_another_stage() -> None:
    model = shape("Qwen2.5-Math-1.5B")
    embedding = model.vocab_size * model.letters["H"]
    assert held(model, Layout(), 0).vocabulary == embedding
    stages = [held(model, Layout(pipeline=4), stage) for stage in range(4)]
    assert [stage.vocabulary for stage in stages] == [embedding, 0, 0, embedding]
    assert sum(stage.total for stage in stages) == parameters(model) + embedding


def test_the_vocabulary_is_padded_for_tensor_parallelism() -> None:
    config = bundled()["Qwen2.5-0.5B"] | {"vocab_size": 1001}
    assert held(architecture(config), Layout(tensor=2), 0).vocabulary == 501 * 896


def test_experts_are_spread_over_expert_parallel_ranks() -> None:
    model = shape("Qwen3-30B-A3B")
    alone, spread = held(model, Layout(), 0), held(model, Layout(data=8, expert=8), 0)
    assert alone.experts == 8 * spread.experts == 48 * 128 * 3 * 768 * 2048
    assert alone.dense == spread.dense


@pytest.mark.parametrize(("itemsize", "bytes_each"), [(2, 2 + 4 + 4 + 8), (4, 4 + 4 + 8)])
def test_state_of_one_rank_is_so_many_bytes_a_parameter(itemsize: int, bytes_each: int) -> None:
    mine = held(shape("Qwen2.5-Math-7B"), Layout(), 0)
    assert learner_state(mine, Layout(), itemsize).total == bytes_each * mine.total


def test_only_optimizer_states_are_sharded_over_data_and_context_parallel_ranks() -> None:
    mine = held(shape("Qwen2.5-Math-7B"), Layout(), 0)
    alone, shared = learner_state(mine, Layout(), 2), learner_state(mine, Layout(data=2, context=2), 2)
    assert (alone.weights, alone.gradients) == (shared.weights, shared.gradients)
    assert alone.optimizer == 4 * shared.optimizer


def test_a_layout_goes_into_a_recipe_and_comes_out_again() -> None:
    layout = Layout(tensor=2, pipeline=2, virtual=2, context=2, data=2, sequence=True, recompute="full")
    assert layout.world == 16
    assert layout_of(with_layout(Recipe(), layout), 16) == layout
    assert str(layout) == "TP2 PP2 VPP2 CP2 DP2 SP full recompute"
