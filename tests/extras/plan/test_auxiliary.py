"""The price of auxiliary models: more work costs more, a larger auxiliary model costs more, and no auxiliary model
costs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.cli import main
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.auxiliary import AuxiliaryCost, auxiliary_costs
from mugrpo_megatron.extras.plan.memory import engine_memory, memory
from mugrpo_megatron.extras.plan.plan import make_plan
from mugrpo_megatron.extras.plan.time import phases
from mugrpo_megatron.recipe import Recipe
from tests.extras.plan.test_time import on_four_h200, recipe

SMALL, LARGE = "Qwen2.5-Math-1.5B", "Qwen2.5-32B"
POLICY = {"path": SMALL}


def judged(model: str = SMALL, max_tokens: int = 512, **sections: Any) -> Recipe:
    judge = {"function": "judge", "model": "g", "prompt": "q.j2", "parse": "a:b", "max_tokens": max_tokens}
    functions = {"math": {"function": "math"}, "quality": judge}
    return recipe(model=POLICY, auxiliary={"g": {"model": model}}, reward={"functions": functions}, **sections)


def taught(model: str = SMALL, engine: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    return recipe(
        model=POLICY, auxiliary={"g": {"model": model, "engine": engine or {}}}, objective={"teacher": "g"}, **sections
    )


def cost(chosen: Recipe) -> AuxiliaryCost:
    (only,) = auxiliary_costs(on_four_h200(chosen))
    return only


def test_no_auxiliary_costs_nothing() -> None:
    case = on_four_h200(recipe())
    assert auxiliary_costs(case) == []
    assert phases(case, memory(case, engine_memory(case))).auxiliary == 0.0


def test_longer_answers_cost_a_judge_more_and_a_larger_auxiliary_costs_more_of_everything() -> None:
    assert cost(judged(max_tokens=1024)).work > 1.2 * cost(judged(max_tokens=512)).work
    for auxiliaries in (taught, judged):
        small, large = cost(auxiliaries(SMALL)), cost(auxiliaries(LARGE))
        assert large.work > small.work
        assert large.start - small.start == pytest.approx(2 * (large.parameters - small.parameters) / 2e9)
        assert large.engine.weights > small.engine.weights


def test_a_teacher_reads_at_two_flop_for_each_parameter_and_token() -> None:
    case = on_four_h200(taught(LARGE, rollout={"max_response_tokens": 64}, data={"max_prompt_tokens": 64}))
    (cost_of_model,) = auxiliary_costs(case)
    tokens = 1024 * 128 * 8 * case.mean_sequence
    rate = case.cluster.world * case.cluster.device.flops * case.assumptions.mfu
    assert cost_of_model.work == pytest.approx(2 * cost_of_model.parameters * tokens / rate, rel=0.1)
    longer = taught(LARGE, rollout={"max_response_tokens": 64}, schedule={"updates_per_stage": 4096})
    assert cost(longer).work > 3.9 * cost_of_model.work


def test_a_auxiliary_starts_in_every_stage() -> None:
    few, many = (
        make_plan(taught(schedule={"stages": stages, "updates_per_stage": 64 // stages}), 1, 4, "h200")
        for stages in (2, 16)
    )
    start = few.auxiliaries[0].start
    grown = many.schedules[0].seconds["auxiliary"] - few.schedules[0].seconds["auxiliary"]
    assert grown == pytest.approx(14 * start, rel=1e-6)
    assert few.phases.auxiliary == pytest.approx(few.auxiliaries[0].seconds)


def test_auxiliaries_that_do_not_fit_the_devices_are_refused() -> None:
    with pytest.raises(UserError, match=r"^auxiliary\.g needs .* GiB of .*; raise auxiliary\.g\.engine\.tensor$"):
        make_plan(taught("DeepSeek-R1-Distill-Llama-70B"), 1, 4, "h200")
    assert (
        make_plan(taught("DeepSeek-R1-Distill-Llama-70B", {"tensor": 4}), 1, 4, "h200").auxiliaries[0].engine.requests
        > 1
    )
    with pytest.raises(UserError, match=r"^auxiliary\.g: engine\.tensor = 3 does not divide"):
        make_plan(taught(SMALL, {"tensor": 3}), 1, 4, "h200")
    with pytest.raises(UserError, match=r"^auxiliary\.g\.model = Qwen2\.5-Math-1\.5 .*did you mean"):
        on_four_h200(taught("Qwen2.5-Math-1.5"))


def test_the_tables_have_a_row_for_each_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
[model]
path = "{SMALL}"
[objective]
teacher = "g"
[auxiliary.g]
model = "{SMALL}"
[reward.functions.math]
function = "math"
[reward.functions.quality]
function = "judge"
model = "g"
prompt = "q.j2"
parse = "a:b"
""",
        encoding="utf-8",
    )
    words = ["plan", str(path), "--gpus-per-node", "4"]
    assert main(words) == 0
    said = capsys.readouterr().out
    for row in ("of it: g, teacher", "of it: g, judge quality", "phase: g, teacher", "phase: g, judge quality"):
        assert row in said
    assert main([*words, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [entry["job"] for entry in table["auxiliary"]] == ["teacher", "judge quality"]
    assert table["stage_seconds"]["auxiliary"] == pytest.approx(
        sum(entry["start"] + entry["work"] for entry in table["auxiliary"])
    )
