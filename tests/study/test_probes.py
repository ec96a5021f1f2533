"""Accuracies inside a stage: the ends of a run and its checkpoints, in order. Three-digit sums of the bundled task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint import STATE
from mugrpo_megatron.report.rundata import read_run
from run_scripts.study import probes, run
from run_scripts.study.grid import Cell, load_grid
from tests.study.test_collect import make_cell

pytestmark = pytest.mark.night

GRID = """
updates = 8
rates = [1e-4]
reference = "mu_8"
[one_stage]
title = "One"
seeds = 1
[one_stage.variants]
mu_8 = { title = "mu-GRPO", mu = 8, objective = { name = "mu_grpo" } }
"""


@pytest.fixture
def study(tmp_path: Path) -> run.Study:
    (tmp_path / "grid.toml").write_text(GRID)
    return run.Study(load_grid(tmp_path / "grid.toml"), run.BASE, tmp_path, tmp_path / "model", ("false",))


def test_points_are_the_ends_and_the_checkpoints_inside_the_stage(study: run.Study) -> None:
    cell = Cell("mu_8", 1e-4, 0)
    directory = make_cell(study.out / "inside", cell.name, 1, 8)
    for name, accuracy in (("stage00000-age00006", 0.7), ("stage00000-age00002", 0.6), ("stage00001-age00000", 0.1)):
        (directory / "checkpoints" / name).mkdir(parents=True)
        (directory / "checkpoints" / name / STATE).touch()
        (directory / "evaluations" / name).mkdir(parents=True)
        summary = {"average": {"value": accuracy, "low": 0.0, "high": 1.0}}
        (directory / "evaluations" / name / "summary.json").write_text(json.dumps(summary))
    first, last = (row["accuracy/mean"] for row in read_run(directory).evals)
    assert probes.points(study, cell, 2) == [[0, first], [2, 0.6], [6, 0.7], [8, last]]


def test_a_run_that_fails_is_named(study: run.Study) -> None:
    with pytest.raises(UserError, match=r"mu_8/lr0.0001-seed0 failed: see .*console.log"):
        probes.points(study, Cell("mu_8", 1e-4, 0), 2)


@pytest.mark.parametrize(
    ("question", "is_one"), [("123+456=", True), ("12+345=", False), ("123-456=", False), ("99*9=", False)]
)
def test_sums_are_told_from_other_problems(question: str, is_one: bool) -> None:
    assert probes.is_sum(question) is is_one
