"""Plans: their lengths, tables and JSON, stages that grow, and engines in fp8 or over nodes."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.checks.layouts import bundled_configs
from mugrpo_megatron.cli import command_parser
from mugrpo_megatron.extras.plan.case import PlanCase, find_model, make_case
from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
from mugrpo_megatron.extras.plan.lengths import resident_mean, response_lengths, seconds_to_decode
from mugrpo_megatron.extras.plan.memory import engine_memory, memory
from mugrpo_megatron.extras.plan.plan import make_plan, plan_as_dict
from mugrpo_megatron.extras.plan.printing import about, launch_commands, print_plan, two_digits
from mugrpo_megatron.extras.plan.time import phases
from mugrpo_megatron.recipe import Recipe, load_recipe
from tests.checkout import ROOT

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


RECIPE = Path(ROOT, "run_scripts/recipes/multi_node/qwen2.5-32b.toml")
SETTINGS = ["run.dir=runs/two words", "model.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("nodes", "per_node", "device", "programs"),
    [
        (1, 1, "h200", ["mugrpo"]),
        (1, 4, "cpu", ["run_scripts/torchrun.sh 4"]),
        (1, 8, "h200", ["run_scripts/torchrun.sh 8", "sbatch --nodes 1 --gpus-per-node 8 run_scripts/slurm.sbatch"]),
        (
            4,
            8,
            "h100",
            [
                "run_scripts/torchrun.sh --nodes 4 --node K --master HOST 8",
                "sbatch --nodes 4 --gpus-per-node 8 run_scripts/slurm.sbatch",
            ],
        ),
    ],
)
def test_commands_are_for_the_cluster_and_train_the_planned_recipe(
    nodes: int, per_node: int, device: str, programs: list[str]
) -> None:
    commands = list(launch_commands(RECIPE, SETTINGS, make_cluster(nodes, per_node, device)).values())
    assert [command.partition(" train ")[0] for command in commands] == programs
    for command in commands:
        words = shlex.split(command)
        options = command_parser().parse_args(words[words.index("train") :])
        assert load_recipe(options.recipe, options.overrides) == load_recipe(RECIPE, SETTINGS)


def test_the_scripts_have_these_options() -> None:
    torchrun = Path(ROOT, "run_scripts/torchrun.sh").read_text()
    batch = Path(ROOT, "run_scripts/slurm.sbatch").read_text()
    assert all(f"    {option}) " in torchrun for option in ("--nodes", "--node", "--master"))
    assert {"nodes", "gpus-per-node"} <= set(re.findall(r"^#SBATCH --([\w-]+)", batch, re.MULTILINE))


@given(st.floats(1e-9, 1e12))
def test_two_digits_are_within_half_a_step_of_the_value(value: float) -> None:
    said = two_digits(value)
    assert float(said.replace(",", "")) == pytest.approx(value, rel=0.0501)
    assert len(said.replace(",", "").replace(".", "").strip("0")) <= 2


def test_examples() -> None:
    values = {0: "0", 0.00412: "0.0041", 0.996: "1.0", 9.26: "9.3", 9.99: "10", 156.2: "160", 9_212: "9,200"}
    assert {value: two_digits(value) for value in values} == values
    times = {0: "0 s", 0.71: "0.71 s", 28.2: "28 s", 558: "9.3 min", 133_620: "37 h"}
    assert {seconds: about(seconds) for seconds in times} == times


def step(running: int) -> float:
    return 0.01 + 2e-5 * running


def token_by_token(lengths: np.ndarray, slots: int) -> float:
    """An engine that makes one token of every running response a step and refills empty slots from a queue."""
    queue = np.ceil(lengths).astype(int)
    left, waiting = queue[:slots].copy(), queue[slots:]
    seconds = 0.0
    while left.size:
        seconds += step(left.size)
        left -= 1
        free = int((left == 0).sum())
        left = np.concatenate([left[left > 0], waiting[:free]])
        waiting = waiting[free:]
    return seconds


@pytest.mark.parametrize(("requests", "slots"), [(64, 64), (200, 512), (1000, 64), (1100, 1000), (20_000, 256)])
@pytest.mark.parametrize("spread", [0.1, 0.8, 1.5])
def test_decoding_time_is_that_of_a_simulation(requests: int, slots: int, spread: float) -> None:
    lengths = response_lengths(300, 2000, spread)
    rng = np.random.default_rng(0)
    runs = [token_by_token(rng.choice(lengths, requests), min(slots, requests)) for _ in range(4)]
    assert seconds_to_decode(requests, slots, lengths, step) == pytest.approx(np.mean(runs), rel=0.1)


@given(mean=st.floats(1.5, 900), longest=st.integers(1000, 5000), spread=st.floats(0.05, 2.0))
def test_lengths_have_the_mean_and_the_limit_that_were_asked_for(mean: float, longest: int, spread: float) -> None:
    lengths = response_lengths(mean, longest, spread)
    assert lengths.max() <= longest
    assert lengths.min() >= 1
    assert (np.diff(lengths) >= 0).all()
    assert lengths.mean() == pytest.approx(mean, rel=0.02) or (lengths == 1).any()


def test_a_mean_at_the_limit_makes_all_lengths_the_limit() -> None:
    np.testing.assert_allclose(response_lengths(100, 100, 0.8), 100, rtol=1e-3)


def test_running_responses_of_one_length_are_half_done() -> None:
    lengths = np.full(4, 80.0)
    assert resident_mean(lengths) == 40


def test_nothing_takes_no_time_and_more_takes_longer() -> None:
    lengths = response_lengths(300, 2000, 0.8)
    assert seconds_to_decode(0, 8, lengths, step) == 0
    times = [seconds_to_decode(n, 64, lengths, step) for n in (1, 10, 64, 65, 200, 1000)]
    assert times == sorted(times)
