"""Parameters of a rank: all ranks together hold the model, each parameter as often as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.checks.layouts import bundled_configs
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.lora.targets import adapted_leaves, adapter_parameters, target_kinds
from mugrpo_megatron.extras.plan.case import Layout, layout_of, make_case, parameters, rank_parameters
from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
from mugrpo_megatron.extras.plan.memory import engine_memory, learner_state
from mugrpo_megatron.extras.plan.plan import make_plan
from mugrpo_megatron.extras.plan.search import compare_layouts, recipe_keys
from mugrpo_megatron.extras.plan.time import checkpoint_bytes
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.recipe.systems import ParallelSection
from mugrpo_megatron.weights.architecture import Architecture
from mugrpo_megatron.weights.families import architecture

LARGE = Path(__file__).parents[3] / "run_scripts" / "recipes" / "multi_node" / "llama-3.3-70b.toml"


def shape(name: str) -> Architecture:
    return architecture(bundled_configs()[name])


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
    together = sum(tensor * rank_parameters(model, layout, stage).total for stage in range(pipeline))
    assert together == parameters(model) + (tensor - 1) * replicated(model, model.layers)


def test_a_tied_output_layer_is_a_copy_only_on_another_stage() -> None:
    model = shape("Qwen2.5-Math-1.5B")
    embedding = model.vocab_size * model.letters["H"]
    assert rank_parameters(model, Layout(), 0).vocabulary == embedding
    stages = [rank_parameters(model, Layout(pipeline=4), stage) for stage in range(4)]
    assert [stage.vocabulary for stage in stages] == [embedding, 0, 0, embedding]
    assert sum(stage.total for stage in stages) == parameters(model) + embedding


def test_the_vocabulary_is_padded_for_tensor_parallelism() -> None:
    config = bundled_configs()["Qwen2.5-0.5B"] | {"vocab_size": 1001}
    assert rank_parameters(architecture(config), Layout(tensor=2), 0).vocabulary == 501 * 896


def test_experts_are_spread_over_expert_parallel_ranks() -> None:
    model = shape("Qwen3-30B-A3B")
    alone, spread = rank_parameters(model, Layout(), 0), rank_parameters(model, Layout(data=8, expert=8), 0)
    assert alone.experts == 8 * spread.experts == 48 * 128 * 3 * 768 * 2048
    assert alone.dense == spread.dense


@pytest.mark.parametrize(("itemsize", "bytes_each"), [(2, 2 + 4 + 4 + 8), (4, 4 + 4 + 8)])
def test_state_of_one_rank_is_so_many_bytes_a_parameter(itemsize: int, bytes_each: int) -> None:
    mine = rank_parameters(shape("Qwen2.5-Math-7B"), Layout(), 0)
    assert learner_state(mine, Layout(), itemsize).total == bytes_each * mine.total


def test_only_optimizer_states_are_sharded_over_data_and_context_parallel_ranks() -> None:
    mine = rank_parameters(shape("Qwen2.5-Math-7B"), Layout(), 0)
    alone, shared = learner_state(mine, Layout(), 2), learner_state(mine, Layout(data=2, context=2), 2)
    assert (alone.weights, alone.gradients) == (shared.weights, shared.gradients)
    assert alone.optimizer == 4 * shared.optimizer


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_an_adapter_alone_has_gradients_and_optimizer_states(name: str) -> None:
    model, rank = shape(name), 16
    mine = rank_parameters(model, Layout(), 0)
    factors = [leaf.shapes(rank) for leaf in adapted_leaves(model, target_kinds(model, "all-linear"))]
    numel = sum(rows * columns for shapes in factors for rows, columns in shapes.values())
    counts = adapter_parameters(model, rank, "all-linear", range(model.layers))
    assert sum(counts) == numel
    spread = adapter_parameters(model, rank, "all-linear", range(model.layers), expert=8)
    assert (spread[0], 8 * spread[1]) == counts
    case = make_case(
        Recipe.model_validate({"lora": {"rank": rank}}),
        model,
        bundled_configs()[name],
        make_cluster(1, 1, "h100"),
        Assumptions(),
    )
    adapter = case.adapter(Layout())
    assert learner_state(mine, Layout(), 2, adapter).total == 2 * mine.total + (2 + 4 + 4 + 8) * numel
    assert checkpoint_bytes(case) == (2 + 4 + 8) * numel
    halves = [case.adapter(Layout(tensor=2)), case.adapter(Layout(pipeline=2))]
    assert numel / 2 < halves[0].total < numel
    assert halves[1].total == numel / 2


def test_a_recipe_on_a_cluster_has_one_layout() -> None:
    parallel = {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "context": 2}
    layout = layout_of(ParallelSection.model_validate(parallel), "full", 16)
    assert layout == Layout(tensor=2, pipeline=2, virtual=2, context=2, data=2, sequence=True, recompute="full")
    assert layout.world == 16
    assert str(layout) == "TP2 PP2 VPP2 CP2 DP2 SP full recompute"


@pytest.mark.parametrize(
    ("sections", "device", "said"),
    [
        ({"model": {"dtype": "float32"}}, "h200", "the norms of SGLang take half precision there"),
        ({"learner": {"routing_replay": "rollout"}}, "cpu", "needs CUDA to generate"),
    ],
)
def test_a_plan_refuses_what_a_run_on_its_devices_refuses(sections: dict[str, Any], device: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_plan(Recipe.model_validate(sections), 1, 1, device)


def test_too_few_ranks_are_answered_with_options_of_the_plan() -> None:
    """Not with how to launch them, which is what `mugrpo train` says."""
    recipe = Recipe.model_validate({"model": {"path": "Qwen2.5-Math-7B"}, "parallel": {"tensor": 2}})
    with pytest.raises(UserError) as refused:
        make_plan(recipe, 1, 1, "rtx4090")
    said = str(refused.value)
    assert "needs a multiple of 2 ranks but 1 run; plan such a number with --nodes and --gpus-per-node" in said
    assert "no layout, recomputation, engine.tensor or engine.memory_fraction fits 1 x 1 rtx4090: " in said
    assert said.endswith("; or take a smaller model")
    assert "torchrun" not in said


@pytest.mark.parametrize("name", ["Qwen2.5-Math-7B", "Qwen3-30B-A3B"])
def test_the_options_of_a_candidate_give_its_layout(name: str) -> None:
    recipe = Recipe.model_validate({"parallel": {"context": 2}, "learner": {"recompute": "selective"}})
    cluster = make_cluster(1, 4, "h200")
    case = make_case(recipe, shape(name), bundled_configs()[name], cluster, Assumptions())
    found = compare_layouts(case, engine_memory(case))
    assert len(found) > 10
    for candidate in found:
        options = recipe_keys(recipe, candidate.recipe).replace("--set ", "").split()
        again = load_recipe(None, ["parallel.context=2", "learner.recompute=selective", *options])
        assert layout_of(again.parallel, again.learner.recompute, cluster.world) == candidate.layout


OWN = ["parallel.tensor=1", "parallel.pipeline=1", "parallel.virtual_pipeline=1"]
SMALL = ["model.path=Qwen/Qwen2.5-0.5B-Instruct", "model.dtype=bfloat16"]
REFUSED: dict[str, tuple[Path | None, list[str], tuple[int, int, str], set[str]]] = {
    "70B, engines of one device": (LARGE, ["engine.tensor=1"], (16, 8, "h200"), {"engine.tensor"}),
    "70B, no layout": (
        LARGE,
        ["engine.tensor=1", *OWN],
        (16, 8, "h200"),
        {"engine.tensor", "parallel.tensor"},
    ),
    "0.5B on 24 GB": (None, SMALL, (1, 1, "rtx4090"), {"engine.memory_fraction", "learner.recompute"}),
    "a layout that the ranks cannot run": (None, [*SMALL, "parallel.tensor=7"], (1, 4, "h100"), {"parallel.tensor"}),
    "engines that do not divide a node": (None, [*SMALL, "engine.tensor=3"], (1, 4, "h100"), {"engine.tensor"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_one_complete_set_of_settings(name: str) -> None:
    path, overrides, cluster, keys = REFUSED[name]
    with pytest.raises(UserError, match="; what fits is ") as refused:
        make_plan(load_recipe(path, overrides), *cluster)
    assert "more devices" not in str(refused.value)
    settings = str(refused.value).partition("what fits is ")[2].partition(": ")[2].replace("--set ", "").split()
    assert keys <= {setting.partition("=")[0] for setting in settings}
    assert make_plan(load_recipe(path, [*overrides, *settings]), *cluster).memory.fits


def test_no_devices_are_advised_where_they_do_not_help() -> None:
    with pytest.raises(
        UserError, match=r"exceeds the model's 32768 positions \(max_position_embeddings\); lower one of the two$"
    ):
        make_plan(load_recipe(None, [*SMALL, "rollout.max_response_tokens=40000"]), 1, 8, "h100")
