"""Time: against independently computed figures, and the properties of a cost model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mugrpo_megatron.checks.layouts import bundled_configs
from mugrpo_megatron.extras.plan.case import Layout, PlanCase, make_case
from mugrpo_megatron.extras.plan.decoding import decoding_seconds
from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
from mugrpo_megatron.extras.plan.memory import engine_memory, memory, micro_batches_in_flight
from mugrpo_megatron.extras.plan.schedules import Schedule, schedules
from mugrpo_megatron.extras.plan.time import (
    bubble,
    evaluation_seconds,
    evaluations,
    logprob_seconds,
    saving_seconds,
    stage_bytes,
    step_seconds,
    token_flops,
)
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.families import architecture

ASSUMPTIONS = Assumptions()
CONFIG = bundled_configs()["Qwen2.5-Math-7B"]
MODEL = architecture(CONFIG)


def recipe(**sections: dict[str, Any]) -> Recipe:
    table: dict[str, dict[str, Any]] = {
        "rollout": {"prompts_per_update": 128, "responses_per_prompt": 8, "max_response_tokens": 3072},
        "schedule": {"stages": 4, "updates_per_stage": 1024},
        "parallel": {"tensor": 2},
    }
    for name, values in sections.items():
        table[name] = {**table.get(name, {}), **values}
    return Recipe.model_validate(table)


def test_forward_and_backward_of_a_7b_token_are_42_gflop() -> None:
    """6 x (parameters - embedding), the usual count, without attention."""
    work = token_flops(MODEL, 1000)
    assert 3 * (work.layers + work.head) == pytest.approx(42.4e9, rel=0.005)
    assert 3 * work.attention == pytest.approx(6 * 28 * 3584 * 1000)


def test_only_chosen_experts_cost_work() -> None:
    work = token_flops(architecture(bundled_configs()["Qwen3-30B-A3B"]), 1)
    assert (work.layers + work.head) / 2 == pytest.approx(3.0e9, rel=0.05)  # "A3B", less the embedding


@pytest.mark.parametrize(
    ("layout", "micro_batches", "share"),
    [
        (Layout(), 8, 0.0),
        (Layout(pipeline=4), 1, 3 / 4),
        (Layout(pipeline=4), 9, 3 / 12),
        (Layout(pipeline=4, virtual=3), 4, 3 / 15),
    ],
)
def test_bubble(layout: Layout, micro_batches: int, share: float) -> None:
    assert bubble(layout, micro_batches) == pytest.approx(share)


@pytest.mark.parametrize(
    ("layout", "micro_batches", "in_flight"),
    [
        (Layout(pipeline=4), 16, [4, 3, 2, 1]),
        (Layout(pipeline=4), 2, [2, 2, 2, 1]),
        (Layout(pipeline=2, virtual=2), 8, [2.5, 1.5]),
        (Layout(), 8, [1]),
    ],
)
def test_micro_batches_in_flight(layout: Layout, micro_batches: int, in_flight: list[float]) -> None:
    stages = range(layout.pipeline)
    assert [micro_batches_in_flight(layout, stage, micro_batches) for stage in stages] == in_flight


def on_four_h200(chosen: Recipe, assumptions: Assumptions = ASSUMPTIONS) -> PlanCase:
    return make_case(chosen, MODEL, CONFIG, make_cluster(1, 4, "h200"), assumptions)


def costs(**sections: dict[str, Any]) -> list[Schedule]:
    case = on_four_h200(recipe(**sections))
    return schedules(case, memory(case, engine_memory(case)))


def test_the_same_updates_cost_the_same_to_take_and_less_to_generate_in_few_stages() -> None:
    ours, grpo, mu = costs()
    assert (grpo.stages, grpo.updates_per_stage) == (1024, 4)
    assert (mu.stages, mu.updates_per_stage) == (4, 1024)
    assert ours.seconds == mu.seconds
    assert grpo.seconds["optimize"] == pytest.approx(mu.seconds["optimize"])
    assert grpo.seconds["evaluate"] == mu.seconds["evaluate"]
    assert grpo.seconds["switch"] == pytest.approx(256 * mu.seconds["switch"])
    assert grpo.tail > mu.tail >= 0
    assert grpo.total > mu.total
    assert mu.stage_bytes == pytest.approx(256 * grpo.stage_bytes)
    assert (mu.rates, grpo.rates) == pytest.approx((1024 * 1e-6, 4 * 1e-6))


@pytest.mark.parametrize(
    ("stages", "updates", "section", "before", "woken"),
    [
        (4, 1024, {"every_stages": 1}, [0, 1024, 2048, 3072], [4096]),
        (4, 1024, {"every_stages": 0}, [0], [4096]),
        (2, 8, {"every_stages": 1, "every_updates": 3}, [0, 8], [3, 6, 11, 14, 16]),
        (2, 8, {"every_stages": 1, "every_updates": 4}, [0, 8], [4, 12, 16]),
        (8, 4, {"every_stages": 3, "every_updates": 4}, [0, 12, 24], [32]),
    ],
)
def test_evaluations_are_those_that_training_makes(
    stages: int, updates: int, section: dict[str, int], before: list[int], woken: list[int]
) -> None:
    """`before` and `woken`: updates taken at each evaluation."""
    chosen = recipe(schedule={"stages": stages, "updates_per_stage": updates}, eval=section)
    assert evaluations(chosen.schedule, chosen.eval) == (len(before), len(woken))


def test_each_held_out_set_costs_what_its_own_samples_do() -> None:
    def seconds(sources: str, **section: Any) -> float:
        case = on_four_h200(recipe(data={"eval": sources}, eval=section))
        return evaluation_seconds(case, engine_memory(case))

    once = seconds("math500")
    assert seconds("math500", sets={"math500": {"samples": 32}}) > 5 * once
    assert seconds("math500", samples=32) == seconds("math500", sets={"math500": {"samples": 32}})
    assert seconds("math500", max_tokens=512) < once / 3
    both = seconds("math500,aime24", sets={"aime24": {"samples": 32}})
    assert both == pytest.approx(once + seconds("aime24", samples=32))


def test_each_whole_stage_pass_is_counted_once() -> None:
    learner, near_ref = {"behaviour": "learner"}, {"name": "mu_grpo", "kl_coef": 0.01}
    start, stage = ({**near_ref, "kl_ref": name} for name in ("start", "stage"))
    replay = {"routing_replay": "learner"}
    wanted = [
        (recipe(), 0),
        (recipe(objective=start), 1),
        (recipe(objective=stage), 1),
        (recipe(objective=start, rollout=learner), 2),
        (recipe(objective=stage, rollout=learner), 1),
        (recipe(learner=replay), 1),
        (recipe(objective={"name": "off_policy_grpo", "proximal_every": 4}), 1),
        (recipe(learner=replay, rollout=learner), 1),
    ]
    none, learner_pass = (logprob_seconds(on_four_h200(recipe(rollout=how))) for how in ({}, learner))
    for made, passes in wanted:
        assert logprob_seconds(on_four_h200(made)) == pytest.approx(none + passes * (learner_pass - none))


def test_ranks_beyond_the_key_value_heads_read_copies_of_the_cache() -> None:
    """Four of these heads: eight ranks read as many bytes of cache a token each as four do."""
    cluster, slow = make_cluster(1, 8, "h200"), Assumptions(step_floor=1e-9, decode=0.01)  # nothing but reading
    seconds = []
    for tensor in (2, 4, 8):
        case = make_case(recipe(engine={"tensor": tensor}), MODEL, CONFIG, cluster, slow)
        seconds.append(decoding_seconds(4096, case, replace(engine_memory(case), weights=0.0, requests=64)))
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05), "twice the ranks, half the engines"
    assert seconds[2] == pytest.approx(2 * seconds[1], rel=0.05)


def test_a_stage_is_as_large_as_its_columns() -> None:
    small = recipe(
        schedule={"stages": 1, "updates_per_stage": 2}, rollout={"prompts_per_update": 2, "max_response_tokens": 100}
    )
    assumptions = Assumptions(mean_prompt=0.1, mean_response=0.5)
    assert stage_bytes(on_four_h200(small, assumptions)) == pytest.approx(32 * (50 * 8 + 51.2 * 4 + 40))


def test_only_what_is_trained_is_stepped_and_saved() -> None:
    """An adapter's step and save take the seconds of its share of the parameters."""
    sections: dict[str, dict[str, Any]] = {"checkpoint": {"asynchronous": False}, "parallel": {"tensor": 1}}
    cases = [
        make_case(recipe(**sections, lora=lora), MODEL, CONFIG, make_cluster(1, 8, "h200"), ASSUMPTIONS)
        for lora in ({}, {"rank": 8})
    ]
    share = cases[1].trained(0).total / cases[0].trained(0).total
    assert 0.001 < share < 0.01
    for seconds in (step_seconds, partial(saving_seconds, 0.0)):
        full, adapted = (seconds(case) for case in cases)
        assert adapted == pytest.approx(share * full, rel=0.05)
