"""The law's cells: their order, how far a stage has moved, and the rows of its problems."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from run_scripts.study import law
from run_scripts.study.collect import TAIL, nats_of
from run_scripts.study.grid import load_grid

GRID = load_grid(law.GRID)


def updates(*stages: list[float]) -> list[dict[str, float]]:
    return [{"stage": stage, "kl_k3": value} for stage, values in enumerate(stages) for value in values]


def test_every_step_is_of_a_start_and_a_block_and_no_cell_comes_twice() -> None:
    assert {start for start, _ in law.STEPS} == set(law.STARTS)
    assert len(set(law.STEPS)) == len(law.STEPS)
    assert all(law.cells_of(GRID, block) for _, block in law.STEPS)
    cells = [cell for block in GRID.blocks for cell in law.cells_of(GRID, block)]
    assert len(set(cells)) == len(cells)


def test_stages_of_e5_take_as_many_updates_as_grpo() -> None:
    assert {GRID.phases(cell.method) * GRID.methods[cell.method].mu for cell in law.cells_of(GRID, "stages")} == {512}
    assert {GRID.methods[name].updates for name in GRID.methods} == {512}


@pytest.mark.parametrize(
    ("stages", "tokens", "nats"),
    [
        ([[0.0] * (100 - TAIL) + [0.01] * TAIL] * 2, 60.0, [0.6, 0.6]),  # of each stage's end
        ([[0.0, 0.0, 0.0, 0.5]], 2.0, [1.0]),  # of a short stage's last quarter
        ([[0.0] * 24 + [0.1] * 8], 1.0, [0.1]),
        ([[0.25], [0.5]], 4.0, [1.0, 2.0]),
    ],
)
def test_nats_are_those_of_each_stages_end(stages: list[list[float]], tokens: float, nats: list[float]) -> None:
    assert nats_of(updates(*stages), tokens=tokens) == pytest.approx(nats)


def test_right_samples_are_counted_problem_by_problem(tmp_path: Path) -> None:
    rows = [{"problem": {"question": name}, "rewards": own} for name, own in (("b=", [1.0, 0.0]), ("a=", [1.0, 1.0]))]
    (tmp_path / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert law.read_sampled(tmp_path) is None, "an evaluation that is not finished"
    assert list(law.problem_rows(None, start="s", of="end")) == []
    (tmp_path / "summary.json").write_text("{}")
    sampled = law.read_sampled(tmp_path)
    assert sampled is not None
    assert sampled.accuracy == 0.75
    assert [(row["problem"], row["right"]) for row in law.problem_rows(sampled, of="end")] == [("a=", 2), ("b=", 1)]


def test_a_difference_is_paired_problem_by_problem() -> None:
    left, right = law.Sampled({"a": 8, "b": 4}, 8), law.Sampled({"b": 2, "a": 6}, 8)
    assert law.difference(left, right) == (0.25, 0.0)
    gap, half = law.difference(left, law.Sampled({"a": 8, "b": 0}, 8))
    assert (gap, half) == (0.25, pytest.approx(1.96 * 0.35355 / 2**0.5, rel=1e-4))


def test_the_rows_of_stages_say_where_each_began_and_how_far_it_went() -> None:
    stages = [
        {"stage": stage, "reward_mean": accuracy, "generated_tokens": 600.0, "responses": 10.0}
        for stage, accuracy in enumerate((0.3, 0.6))
    ]
    steps = [{"stage": number // 4, "update": number, "kl_k3": 0.01 * (number % 4)} for number in range(8)]
    run = SimpleNamespace(stages=stages, updates=steps, stage_starts=lambda: [steps[0], steps[4]])
    first, second = law.stage_rows({"method": "two", "rate": 4e-5}, run)  # type: ignore[arg-type]
    assert (first["update"], first["sampled"], second["update"], second["sampled"]) == (0, 0.3, 4, 0.6)
    assert first["nats"] == second["nats"] == "1.8"
