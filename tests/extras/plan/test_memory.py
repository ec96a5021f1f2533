"""Planned memory against measured allocations of the learner, and the phases against their arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.checks.layouts import bundled_configs
from mugrpo_megatron.extras.plan.case import make_case
from mugrpo_megatron.extras.plan.hardware import GIB, Assumptions, Cluster, make_cluster
from mugrpo_megatron.extras.plan.memory import CPU_IMPORTS, Memory, PackedRows, engine_memory, learner_memory, memory
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import sync_bucket_bytes
from mugrpo_megatron.weights.families import architecture
from tests.extras.plan.measured import learner_bytes, save_random
from tests.ranks import run_ranks

DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "qk norm": {**DENSE, "model_type": "qwen3", "head_dim": 32},
    "experts": {
        **DENSE,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "delta": {
        **DENSE,
        "model_type": "qwen3_5_text",
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "full_attention_interval": 4,
    },
    "larger": {
        **DENSE,
        "vocab_size": 16000,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 10,
    },
}
ASSUMPTIONS = Assumptions()
RESPONSES, PROMPT, RESPONSE, ROW = 16, 32, 96, 1024
FEWER = {"bfloat16": 8}
"""Responses of one micro-batch, where products are slow on processors that have none of this type."""


def check(name: str, directory: Path, world: int, changes: dict[str, dict[str, Any]]) -> None:
    """The plan of every pipeline stage is within 1 % of the measured state and 10 % of the update's peak."""
    table: dict[str, dict[str, Any]] = {
        "model": {"path": str(save_random(directory, MODELS[name])), "dtype": "float32"},
        "rollout": {"max_response_tokens": RESPONSE},
        "learner": {"threads": 1, "micro_batch_tokens": ROW, "loss_chunk_tokens": 256},
    }
    for section, values in changes.items():
        table[section] = {**table.get(section, {}), **values}
    recipe, cluster = Recipe.model_validate(table), make_cluster(1, world, "cpu")
    case = make_case(recipe, architecture(MODELS[name]), MODELS[name], cluster, ASSUMPTIONS)
    responses = FEWER.get(recipe.model.dtype, RESPONSES)
    measured = run_ranks(
        world, learner_bytes, table, responses, PROMPT, RESPONSE, MODELS[name]["vocab_size"], timeout_s=300
    )
    layout = case.layout
    tokens = responses * (PROMPT + RESPONSE) // layout.data
    for stage in range(layout.pipeline):
        planned = learner_memory(case, PackedRows(min(ROW, tokens), -(-tokens // ROW)), stage)
        state, peak = measured[stage * world // layout.pipeline]
        print(
            f"| {name} | {layout}, stage {stage} | {recipe.model.dtype} "
            f"| {state / 2**20:.1f} | {planned.state.total / 2**20:.1f} "
            f"| {peak / 2**20:.1f} | {planned.update / 2**20:.1f} | {planned.update / peak:.3f} |"
        )
        assert planned.state.total == pytest.approx(state, rel=0.01)
        assert planned.update == pytest.approx(peak, rel=0.1)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "world", "changes"),
    [
        ("dense", 1, {"model": {"dtype": "bfloat16"}}),
        ("dense", 1, {"learner": {"recompute": "full"}}),
        ("qk norm", 1, {}),
        ("experts", 2, {"parallel": {"expert": 2}}),
        *(
            pytest.param(name, world, changes, marks=pytest.mark.night)
            for name, world, changes in [
                ("dense", 1, {}),
                ("dense", 1, {"learner": {"recompute": "selective"}}),
                ("dense", 2, {}),
                ("dense", 2, {"parallel": {"tensor": 2}}),
                ("dense", 2, {"parallel": {"pipeline": 2}}),
                ("dense", 2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
                ("dense", 2, {"parallel": {"context": 2}}),
                ("experts", 1, {}),
                ("delta", 1, {}),
                ("delta", 2, {"parallel": {"tensor": 2}, "learner": {"recompute": "selective"}}),
                ("larger", 1, {}),
                ("larger", 1, {"learner": {"recompute": "full"}}),
                ("larger", 2, {"parallel": {"tensor": 2}}),
            ]
        ),
    ],
    ids=str,
)
def test_state_and_update_within_a_tenth(name: str, world: int, changes: dict[str, Any], tmp_path: Path) -> None:
    check(name, tmp_path, world, changes)


CONFIG = bundled_configs()["Qwen2.5-Math-7B"]
MODEL = architecture(CONFIG)


def large(**sections: dict[str, Any]) -> Recipe:
    table = {
        "rollout": {"max_response_tokens": 3072, "prompts_per_update": 32},
        "parallel": {"tensor": 2},
    }
    return Recipe.model_validate({**table, **sections})


def needed(recipe: Recipe, cluster: Cluster) -> Memory:
    case = make_case(recipe, MODEL, CONFIG, cluster, ASSUMPTIONS)
    return memory(case, engine_memory(case))


def test_adam_of_a_7b_model_is_91_gigabytes() -> None:
    """Moments and float32 master weights, the figure that users quote."""
    found = needed(large(parallel={}), make_cluster(1, 1, "h200"))
    assert found.learning.state.optimizer == pytest.approx(91.4e9, rel=0.001)
    assert not found.fits
    assert "the learner phase needs" in found.problems[0]


def test_the_cache_is_what_the_fraction_leaves() -> None:
    cluster = make_cluster(1, 4, "h200")
    found = engine_memory(make_case(large(), MODEL, CONFIG, cluster, ASSUMPTIONS))
    free = cluster.device.memory - ASSUMPTIONS.learner_rest - ASSUMPTIONS.engine_rest
    assert found.weights + found.cache == pytest.approx(0.8 * free)
    assert found.tokens == int(found.cache / 57_344)
    assert found.requests == 1024
    small = large(engine={"extra": {"max_total_tokens": 10_000}})
    limited = engine_memory(make_case(small, MODEL, CONFIG, cluster, ASSUMPTIONS))
    assert limited.tokens == 10_000
    assert 1 <= limited.requests < 10


def test_an_engine_whose_weights_do_not_fit_has_no_room_for_a_response() -> None:
    found = needed(large(engine={"memory_fraction": 0.05}), make_cluster(1, 4, "h200"))
    assert found.serving.requests == 0
    assert any("no room for one response" in problem for problem in found.problems)


def test_recompute_trades_memory_and_more_ranks_share_it() -> None:
    def update(**sections: Any) -> float:
        return needed(large(**sections), make_cluster(1, 8, "h200")).learning.update

    none, selective, full = (update(learner={"recompute": choice}) for choice in ("none", "selective", "full"))
    assert full < selective < none
    assert update(parallel={"tensor": 4}) < none
    assert update(parallel={"tensor": 2, "context": 2}) < none


def test_a_sync_takes_larger_buckets_on_cuda_and_both_embeddings_at_once() -> None:
    assert (sync_bucket_bytes(False), sync_bucket_bytes(True)) == (GIB // 2, 4 * GIB)
    found = needed(large(), make_cluster(1, 4, "h200"))
    rests = ASSUMPTIONS.learner_rest + ASSUMPTIONS.engine_rest
    assert 4 * GIB <= found.sync - found.learning.state.weights - found.serving.weights - rests < 5 * GIB


def test_on_cpu_learner_and_engine_are_there_together() -> None:
    found = needed(large(parallel={}), make_cluster(1, 2, "cpu"))
    assert found.generate == found.learning.state.total + found.serving.total + 2 * CPU_IMPORTS
    assert found.learn > found.generate - GIB
