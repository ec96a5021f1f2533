"""The same updates under other schedules: hours, speed-ups, and what a schedule may lose, computed directly."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.cli import main
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.case import PlanCase, find_model, make_case
from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
from mugrpo_megatron.extras.plan.memory import Memory, engine_memory, memory
from mugrpo_megatron.extras.plan.printing_schedules import read_pilot
from mugrpo_megatron.extras.plan.schedules import (
    evaluated_every,
    grpo_seconds,
    may_lose,
    schedule_of,
    speeds,
    updates_between,
)
from mugrpo_megatron.extras.plan.time import evaluations
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.recipe.scoring import EvalSection
from mugrpo_megatron.recipe.sections import ScheduleSection
from tests.checkout import ROOT
from tests.report.synthetic import write_run

UPDATES = 4096


def case_of(recipe: Recipe) -> tuple[PlanCase, Memory]:
    """The recipe on 4 x H200."""
    found = find_model(recipe.model)
    case = make_case(recipe, found.architecture, found.config, make_cluster(1, 4, "h200"), Assumptions())
    return case, memory(case, engine_memory(case))


def paper(method: str = "grpo", *overrides: str) -> tuple[PlanCase, Memory]:
    return case_of(load_recipe(Path(f"paper/qwen2.5-math-7b.{method}.toml"), list(overrides)))


def test_most_of_what_1024_updates_save_is_saved_by_16() -> None:
    case, need = paper()
    found = {speed.schedule.updates_per_stage: speed for speed in speeds(case, need)}
    assert sorted(found) == [2**n for n in range(13)]
    hours = {size: round(speed.schedule.without_evaluations / 3600, 1) for size, speed in found.items()}
    shares = {size: round(100 * speed.share) for size, speed in found.items()}
    sizes = (4, 8, 16, 32, 64, 128, 1024)
    assert [hours[size] for size in sizes] == [26.9, 22.9, 21.2, 20.8, 20.5, 20.4, 20.2]
    assert [shares[size] for size in sizes] == [0, 60, 85, 92, 96, 98, 100]
    assert found[4].speed_up == pytest.approx(1)
    for size, speed in found.items():
        assert speed.low <= speed.speed_up <= speed.high
        assert (speed.low < speed.speed_up < speed.high) == (size != 4)


def test_what_a_schedule_saves_consists_of_tails_switches_syncs_and_passes_of_a_few_responses() -> None:
    case, need = paper()
    few, many = (schedule_of(case, need, UPDATES, size) for size in (4, 1024))
    saved = few.without_evaluations - many.without_evaluations
    parts = (
        few.tail - many.tail + sum(few.seconds[name] - many.seconds[name] for name in ("switch", "sync", "logprobs"))
    )
    assert parts + few.seconds["save"] - many.seconds["save"] == pytest.approx(saved)
    assert few.seconds["optimize"] == pytest.approx(many.seconds["optimize"])


def test_a_baseline_has_no_pass_that_only_stale_responses_need() -> None:
    plain, decoupled = (paper("grpo", *keys) for keys in ((), ("objective.name=decoupled_ppo",)))
    assert grpo_seconds(*decoupled) == pytest.approx(grpo_seconds(*plain))
    costs = [schedule_of(*case, UPDATES, 16) for case in (plain, decoupled)]
    sampled = 64  # responses of the pass that every stage has
    assert costs[1].seconds["logprobs"] == pytest.approx((sampled + 16 * 256) / sampled * costs[0].seconds["logprobs"])


@pytest.mark.parametrize(
    ("per_stage", "section", "before", "woken"),
    [
        (4, {"every_stages": 64}, 16, 1),
        (16, {"every_stages": 16}, 16, 1),
        (256, {"every_stages": 1}, 16, 1),
        (1024, {"every_stages": 1, "every_updates": 256}, 4, 13),
        (4096, {"every_stages": 1, "every_updates": 256}, 1, 16),
    ],
)
def test_every_schedule_is_evaluated_after_the_same_updates(
    per_stage: int, section: dict[str, int], before: int, woken: int
) -> None:
    ours = ScheduleSection(stages=1024, updates_per_stage=4)
    every = updates_between(ours, EvalSection(every_stages=64))
    assert every == 256
    other = ScheduleSection(stages=UPDATES // per_stage, updates_per_stage=per_stage)
    spaced = evaluated_every(every, EvalSection(every_stages=64), other)
    assert {key: value for key, value in spaced.model_dump().items() if key in section} == section
    assert evaluations(other, spaced) == (before, woken)
    assert updates_between(other, spaced) == 256


def test_a_run_that_is_evaluated_at_its_ends_alone_stays_so() -> None:
    never = EvalSection(every_stages=0)
    assert math.isinf(updates_between(ScheduleSection(), never))
    assert evaluations(ScheduleSection(), evaluated_every(math.inf, EvalSection(), ScheduleSection())) == (1, 1)


def pilot_run(folder: Path, curve: dict[int, float], recipe: Recipe | None = None) -> Path:
    rows: list[dict[str, Any]] = [{"kind": "process", "time": 0.0, "environment": {}}]
    for update, value in curve.items():
        figures = {"accuracy": value, "low": value - 0.03, "high": value + 0.03, "problems": 500, "samples": 2}
        held_out = {f"{key}/{name}": figure for key, figure in figures.items() for name in ("chain", "mean")}
        rows.append({"kind": "eval", "time": 1.0 + update, "update": update, "stage": 0, "age": 0, **held_out})
    return write_run(folder, rows, recipe or Recipe())


@pytest.mark.parametrize("seed", [20, 21, 22])
def test_the_break_even_of_a_run_of_the_study(seed: int, tmp_path: Path) -> None:
    """GRPO's curve of part seven at large headroom: A(256) - A(256 / k), by sums over a fine grid."""
    with Path(ROOT, "docs/study/seven_large/curves.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["method"], float(row["rate"])) == ("grpo", 8e-5)]
    curve = {int(row["update"]): float(row["accuracy"]) for row in rows if int(row["seed"]) == seed and row["accuracy"]}
    pilot = read_pilot(pilot_run(tmp_path / "pilot", curve))

    def reaches(updates: float) -> float:
        grid = (np.arange(20_000) + 0.5) / 20_000
        at = updates * (0.75 + grid / 4)
        return float(np.interp(at, sorted(curve), [curve[update] for update in sorted(curve)]).mean())

    for speed_up in (1.0, 1.262, 1.323, 2.25):
        found = may_lose(pilot.curve, speed_up)
        assert found.value == pytest.approx(reaches(256) - reaches(256 / speed_up), abs=1e-5)
    assert may_lose(pilot.curve, 1.0).value == 0


def test_a_pilot_that_cannot_say_it_is_refused(tmp_path: Path) -> None:
    curve = {0: 0.4, 64: 0.5, 128: 0.6}
    falling = Recipe.model_validate({"optimizer": {"decay": "linear"}})
    with pytest.raises(UserError, match=r"its learning rate decays \(linear\)"):
        read_pilot(pilot_run(tmp_path / "falling", curve, falling))
    with pytest.raises(UserError, match="no evaluation"):
        read_pilot(pilot_run(tmp_path / "none", {}))
    with pytest.raises(UserError, match="do not cover"):
        read_pilot(pilot_run(tmp_path / "one", {128: 0.6}))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = pilot_run(tmp_path / "pilot", {0: 0.4, 64: 0.5, 128: 0.6})
    words = [
        "plan",
        "quickstart.toml",
        "--gpus-per-node",
        "1",
        "--set",
        "model.dtype=bfloat16",
        "--set",
        "schedule.updates_per_stage=4",
    ]
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(dict(find_model(Recipe().model.model_copy(update={"path": Path("Qwen3-0.6B")})).config))
    )
    words += ["--model-config", str(config)]
    assert main([*words, "--pilot", str(run)]) == 2
    assert "--schedules" in capsys.readouterr().err
    assert main([*words, "--schedules", "--pilot", str(run)]) == 0
    said = capsys.readouterr().out
    assert "May lose after equal updates" in said
    assert main([*words, "--schedules", "--pilot", str(run), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    rows = {row["updates_per_stage"]: row for row in values["pilot"]["may_lose"]}
    for speed in values["speeds"]:
        row, k = rows[speed["schedule"]["updates_per_stage"]], speed["speed_up"]
        if k > 1:
            # One straight line from 64 to 128 and one before: A(128) - A(128 / k) by hand.
            ends = [0.4 + 0.2 * 128 / k * share / 128 for share in (0.75, 1)]
            assert row["may_lose"] == pytest.approx(0.6 - 0.2 * 0.25 / 2 - sum(ends) / 2, abs=1e-6)
        elif k < 1:
            assert row["may_lose"] is None
