"""What sampling the next stage on other devices is planned to save."""

from __future__ import annotations

from typing import Any

import pytest

from mugrpo_megatron.checks.layouts import bundled
from mugrpo_megatron.extras.plan.case import PlanCase, find_model, make_case
from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
from mugrpo_megatron.extras.plan.memory import engine_memory, memory
from mugrpo_megatron.extras.plan.plan import make_plan, plan_as_dict
from mugrpo_megatron.extras.plan.printing import print_plan
from mugrpo_megatron.extras.plan.search import DeviceSplit, best_split, hiding_split, sampling_seconds
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
    found = find_model(recipe)
    cluster = make_cluster(nodes, 8, "h200")
    return make_case(recipe, found.architecture, found.config, cluster, assumptions or Assumptions())


def alone(case: PlanCase) -> float:
    """Seconds of the run without prefetch."""
    return case.recipe.schedule.stages * phases(case, memory(case, engine_memory(case))).total


def test_a_stage_takes_the_longer_of_its_updates_and_the_sampling_of_the_next() -> None:
    """More nodes for the engines than hide the sampling change nothing; one fewer makes the learner wait."""
    case = case_of(1, Assumptions(mean_response=0.9, spread=0.2, mfu=0.9, decode=0.1))
    hidden = hiding_split(case)
    assert hidden
    assert hidden.wait == 0
    assert hidden.generating > 8, "the case needs several nodes"
    own = phases(case, memory(case, engine_memory(case)))
    trained = own.logprobs + own.optimize + own.save
    first = own.switch + own.sync + own.generate + own.score
    assert hidden.seconds == pytest.approx(first + STAGES * (own.evaluate + trained))
    assert hidden.seconds < alone(case)
    assert hidden.prefetch <= UPDATES


def test_the_learner_waits_for_what_prefetch_does_not_hide() -> None:
    """The recipe's prefetch: each update of it hides an update's time, and no more than the sampling."""
    splits: list[DeviceSplit] = []
    for prefetch in (1, 2, UPDATES):
        found = hiding_split(case_of(1, schedule={"max_sample_age": prefetch})) or best_split(
            case_of(2, schedule={"max_sample_age": prefetch})
        )
        assert found
        assert found.prefetch == prefetch
        splits.append(found)
    assert splits[-1].wait == 0
    case = case_of(2)
    others = case_of(1)
    one, two = (best_split(case_of(2, schedule={"max_sample_age": n})) for n in (1, 2))
    assert one
    assert two
    update = one.wait - two.wait
    assert one.wait == pytest.approx(sampling_seconds(others) - update, rel=1e-6)
    assert one.seconds - two.seconds == pytest.approx((STAGES - 1) * update)
    best = best_split(case)
    assert best
    assert best.seconds <= two.seconds, "a prefetch of 0 leaves the choice to the plan"
    assert (best.prefetch, best.longest_staleness) == (best.prefetch, best.prefetch + UPDATES - 1)


def test_dividing_the_same_devices_pays_only_for_what_does_not_shrink_with_them() -> None:
    """Large stages keep every device busy in turns; small ones wait for their longest responses.

    The disk is fast here: it hands the weights over in every stage.
    """
    batch, tails = {"prompts_per_update": 48}, Assumptions(mean_response=0.2, spread=1.2, disk=1e12)
    grpo = {"stages": 256, "updates_per_stage": 4}
    large, small = case_of(4, tails, rollout=batch), case_of(4, tails, rollout=batch, schedule=grpo)
    gains = []
    for case in (large, small):
        split = best_split(case)
        assert split
        assert split.training + split.generating == case.cluster.world
        gains.append(alone(case) / split.seconds)
    assert gains[0] < 1 < gains[1]


@pytest.mark.parametrize(
    "sections",
    [
        {"schedule": {"stages": 1}},
        {"schedule": {"max_kl": 0.5}},
        {"rollout": {"behaviour": "learner"}},
    ],
)
def test_recipes_that_cannot_prefetch_have_no_split(sections: dict[str, dict[str, Any]]) -> None:
    case = case_of(2, None, **sections)
    assert best_split(case) is None
    assert hiding_split(case) is None


def test_the_plan_prints_and_has_both_splits(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(case_of(2).recipe, 2, 8, "h200")
    values = plan_as_dict(plan, {"here": "mugrpo train r"})
    assert values["prefetch"]["training"] == values["prefetch"]["generating"] == 8
    assert values["prefetch"]["gpu_hours"] == pytest.approx(16 * values["prefetch"]["total"] / 3600)
    assert values["schedules"][0]["gpu_hours"] == pytest.approx(16 * values["schedules"][0]["total"] / 3600)
    assert values["launch"] == {"here": "mugrpo train r"}
    print_plan(plan, {"here": "mugrpo train 'a [b].toml'"})
    said = capsys.readouterr().out
    assert said.startswith("fits: ")
    assert "planned for 2 nodes with 8 x h200 of 139 GiB (--nodes, " in said
    assert "schedule.max_sample_age" in said
    assert "GPU-hours" in said
    assert "    mugrpo train 'a [b].toml'\n" in said


def test_a_plan_of_growing_stages_says_that_its_stage_is_of_mean_length(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = case_of(2, schedule={"stages": 3, "updates_per_stage": 7, "growth": 2.0}).recipe
    plan = make_plan(recipe, 2, 8, "h200")
    assert plan.stage_lengths == (recipe.schedule.length(0), recipe.schedule.length(2)) == (4, 11)
    print_plan(plan, {})
    assert "A stage of mean length, 7 updates; this recipe's have 4 to 11" in " ".join(capsys.readouterr().out.split())


def test_fp8_halves_an_engines_weights_and_several_nodes_slow_its_steps() -> None:
    plain, fp8 = case_of(2), case_of(2, engine={"quantization": "fp8"})
    weights = [engine_memory(case).weights for case in (plain, fp8)]
    vocabulary = 2 * bundled()["Qwen2.5-Math-7B"]["vocab_size"] * bundled()["Qwen2.5-Math-7B"]["hidden_size"]
    whole = weights[0] / 2
    assert weights[1] == pytest.approx((whole - vocabulary) * (1 + 4 / 128**2) + 2 * vocabulary, rel=1e-3)
    inside, across = case_of(2, engine={"tensor": 8}), case_of(2, engine={"tensor": 16, "nodes": 2})
    one, two = (phases(case, memory(case, engine_memory(case))).generate for case in (inside, across))
    assert two > one, "half as many engines, and the network in every step"
