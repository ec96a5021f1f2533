"""Claim 6's ends by the warm start's pass rate: rows from evaluations, bins of every seed, and their means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run_scripts.study import six_passes
from run_scripts.study.cells import Cell
from run_scripts.study.collect import write_rows
from run_scripts.study.law import FEW, MANY
from run_scripts.study.results import Row, read_named
from run_scripts.study.run import Study

GRPO, STAGE = CELLS = [Cell(20, "grpo", 8e-5), Cell(20, "stage", 2e-5)]


def evaluated(directory: Path, rewards: dict[str, list[float]]) -> None:
    directory.mkdir(parents=True)
    rows = [{"problem": {"question": name}, "rewards": own} for name, own in rewards.items()]
    (directory / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (directory / "summary.json").write_text("{}")


def problem(seed: int, name: str, before: float, fresh: float, stale: float) -> Row:
    return {"seed": seed, "problem": name, "before": before, "fresh": fresh, "stale": stale}


def test_a_problem_has_the_shares_of_its_right_samples_once_all_were_evaluated(tmp_path: Path) -> None:
    study = Study(read_named(six_passes.NAME).grid, tmp_path)
    evaluated(study.out / f"start-{MANY}-seed20", {"b=": [1.0, 0.0], "a=": [0.0, 0.0]})
    evaluated(study.directory(GRPO) / f"end-{FEW}", {"a=": [1.0, 0.0], "b=": [1.0, 1.0]})
    assert six_passes.problem_rows(study, CELLS) == []
    evaluated(study.directory(STAGE) / f"end-{FEW}", {"a=": [0.0, 0.0], "b=": [0.0, 1.0]})
    assert six_passes.problem_rows(study, CELLS) == [
        problem(20, "a=", 0.0, 0.5, 0.0),
        problem(20, "b=", 0.5, 1.0, 0.5),
    ]


def test_cells_are_run_at_the_rates_that_the_claim_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert six_passes.cells_of(read_named(six_passes.NAME), 20) == CELLS
    assert six_passes.main(["--out", str(tmp_path), "--docs", str(tmp_path)]) == 2
    assert "run_scripts.study.run" in capsys.readouterr().err


def test_means_are_over_the_seeds_that_have_a_problem_in_the_bin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [problem(20, "a", 0.05, 0.75, 0.5), problem(20, "b", 0.9, 1.0, 0.875), problem(20, "c", 0.8, 1.0, 0.875)]
    rows += [problem(21, "a", 0.9, 1.0, 0.875)]
    write_rows(tmp_path / six_passes.NAME / six_passes.PROBLEMS, six_passes.COLUMNS, rows)
    assert six_passes.main(["--docs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 0 to 0.05 | 1 | 1 | 5.0 | 75.0 | 50.0 | +25.0 |",
        "| 0.3 to 1 | 2 | 2 | 87.5 ± 31.8 | 100.0 ± 0.0 | 87.5 ± 0.0 | +12.5 ± 0.0 |",
    ]
