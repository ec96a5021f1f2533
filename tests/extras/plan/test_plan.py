"""Plans: their tables, their JSON, stages that grow, and engines in fp8 or over nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mugrpo_megatron.checks.layouts import bundled_configs
from mugrpo_megatron.extras.plan.case import PlanCase, find_model, make_case
from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
from mugrpo_megatron.extras.plan.memory import engine_memory, memory
from mugrpo_megatron.extras.plan.plan import make_plan, plan_as_dict
from mugrpo_megatron.extras.plan.printing import print_plan
from mugrpo_megatron.extras.plan.time import phases
from mugrpo_megatron.recipe import Recipe

STAGES, UPDATES = 4, 256


def case_of(nodes: int, assumptions: Assumptions | None = None, **sections: dict[str, Any]) -> PlanCase:
    """Qwen2.5-Math-7B on H200s, TP2, without evaluations inside stages."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "models/Qwen2.5-Math-7B", "dtype": "bfloat16"},
        "schedule": {"stages": STAGES, "updates_per_stage": UPDATES},
        "rollout": {"prompts_per_update": 32, "responses_per_prompt": 8, "max_response_tokens": 3072},
        "parallel": {"tensor": 2},
        "eval": {"every_stages": 0},
    }
    recipe = Recipe.model_validate({**values, **{k: {**values.get(k, {}), **v} for k, v in sections.items()}})
    found = find_model(recipe.model)
    cluster = make_cluster(nodes, 8, "h200")
    return make_case(recipe, found.architecture, found.config, cluster, assumptions or Assumptions())


def test_the_plan_prints_and_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(case_of(2).recipe, 2, 8, "h200")
    values = plan_as_dict(plan, {"here": "mugrpo train r"})
    assert values["schedules"][0]["gpu_hours"] == pytest.approx(16 * values["schedules"][0]["total"] / 3600)
    assert values["launch"] == {"here": "mugrpo train r"}
    print_plan(plan, {"here": "mugrpo train 'a [b].toml'"})
    said = capsys.readouterr().out
    assert said.startswith("fits: ")
    assert "planned for 2 nodes with 8 x h200 of 139 GiB (--nodes, " in said
    assert "GPU-hours" in said
    assert "    mugrpo train 'a [b].toml'\n" in said


def test_a_plan_of_growing_stages_says_that_its_stage_is_of_mean_length(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = case_of(2, schedule={"stages": 3, "updates_per_stage": 7, "growth": 2.0}).recipe
    plan = make_plan(recipe, 2, 8, "h200")
    assert plan.stage_lengths == (recipe.schedule.length(0), recipe.schedule.length(2)) == (4, 11)
    print_plan(plan, {})
    assert "A stage of mean length, 7 updates; this recipe's have 4 to 11" in " ".join(capsys.readouterr().out.split())


def test_engines_on_cpu_need_shared_memory_for_a_sync() -> None:
    case = replace(case_of(1), cluster=make_cluster(1, 4, "cpu"))
    assert memory(case, engine_memory(case)).shared == 4 * 2 * 2 * 152_064 * 3584, "two embeddings"
    assert memory(case_of(1), engine_memory(case_of(1))).shared == 0


def test_fp8_halves_an_engines_weights_and_several_nodes_slow_its_steps() -> None:
    plain, fp8 = case_of(2), case_of(2, engine={"quantization": "fp8"})
    weights = [engine_memory(case).weights for case in (plain, fp8)]
    vocabulary = (
        2 * bundled_configs()["Qwen2.5-Math-7B"]["vocab_size"] * bundled_configs()["Qwen2.5-Math-7B"]["hidden_size"]
    )
    bfloat16 = weights[0] / 2
    assert weights[1] == pytest.approx((bfloat16 - vocabulary) * (1 + 4 / 128**2) + 2 * vocabulary, rel=1e-3)
    inside, across = case_of(2, engine={"tensor": 8}), case_of(2, engine={"tensor": 16, "nodes": 2})
    one_node, two_nodes = (phases(case, memory(case, engine_memory(case))).generate for case in (inside, across))
    assert two_nodes > one_node, "half as many engines, and the network in every step"
