"""The runner: finished cells are skipped, interrupted ones continue, a failed one does not stop the others."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from run_scripts.study import run
from run_scripts.study.grid import Cell, Grid, State, accuracies, load_grid, state_of

pytestmark = [pytest.mark.night, pytest.mark.process]

GRID = """
updates = 4
rates = [1e-4, 1e-3]
reference = "a"
[first]
title = "First"
seeds = 2
[first.variants]
a = { title = "A", mu = 2, objective = { name = "mu_grpo" } }
b = { title = "B", mu = 4, objective = { name = "grpo" } }
"""

PROGRAM = """
import json, sys
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv if "=" in word)
directory = Path(given["run.dir"])
with (directory.parents[1] / "calls").open("a") as calls:
    calls.write(f"{directory.parent.name}/{directory.name}\\n")
(directory / "metrics.jsonl").touch()
broken = directory.parents[1] / "broken"
if broken.exists() and given["objective.name"] in broken.read_text().split():
    sys.exit(1)
rate = float(given["optimizer.lr"])
summary = {"updates": 4, "stages": 4, "accuracy_after": 100 * rate, "seconds": {"total": 60.0}}
(directory / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def study(tmp_path: Path) -> run.Study:
    (tmp_path / "grid.toml").write_text(GRID)
    (tmp_path / "program.py").write_text(PROGRAM)
    grid = load_grid(tmp_path / "grid.toml")
    program = (sys.executable, str(tmp_path / "program.py"))
    return run.Study(grid, run.BASE, tmp_path, tmp_path / "model", program)


def options(**changed: object) -> argparse.Namespace:
    chosen = {"part": [], "cells": [], "seeds": 0, "jobs": 1, "keep": False}
    return argparse.Namespace(**chosen | changed)


def calls(study: run.Study) -> list[str]:
    return (study.out / "calls").read_text().split()


def test_the_whole_grid_runs_once_tuning_first(study: run.Study) -> None:
    assert run.run_all(study, options()) == 0
    assert calls(study) == [
        *("a/lr0.0001-seed0", "b/lr0.0001-seed0", "a/lr0.001-seed0", "b/lr0.001-seed0"),
        *("a/lr0.001-seed1", "b/lr0.001-seed1"),
    ]
    assert accuracies(study.grid, study.out)[Cell("a", 1e-3, 1)] == pytest.approx(0.1)
    assert run.run_all(study, options()) == 0
    assert len(calls(study)) == 6


def test_a_cell_that_fails_is_named_and_tried_again_by_the_next_call(
    study: run.Study, capsys: pytest.CaptureFixture[str]
) -> None:
    (study.out / "broken").write_text("mu_grpo")
    assert run.run_all(study, options(jobs=2)) == 1
    said = capsys.readouterr().out
    assert "failed: a/lr0.0001-seed0" in said
    assert "not run: a/lr?-seed1, its variant is not tuned" in said
    assert "b/lr0.001-seed1: 10.0 %" in said  # the other variant went on
    (study.out / "broken").unlink()
    assert run.run_all(study, options()) == 0
    assert sorted(calls(study)[-3:]) == ["a/lr0.0001-seed0", "a/lr0.001-seed0", "a/lr0.001-seed1"]


def test_cells_parts_and_seeds_can_be_chosen(study: run.Study) -> None:
    assert run.run_all(study, options(cells=["b/*"], seeds=4)) == 0
    assert calls(study)[2:] == [f"b/lr0.001-seed{seed}" for seed in (1, 2, 3)]


def test_a_finished_cell_keeps_its_numbers_and_loses_its_bulk(study: run.Study) -> None:
    directory = study.directory(Cell("a", 1e-4, 0))
    for folder in run.BULK:
        (directory / folder).mkdir(parents=True)
    assert run.run_all(study, options(cells=["a/lr0.0001-seed0"])) == 0
    assert {path.name for path in directory.iterdir()} == {"console.log", "cpu.jsonl", "metrics.jsonl", "summary.json"}


def test_wall_clock_is_taken_again_in_directories_of_its_own(study: run.Study) -> None:
    with pytest.raises(UserError, match="a is not tuned yet; run --part first first"):
        run.remeasure(study, 1)
    run.run_all(study, options())
    assert run.remeasure(study, 2) == 0
    assert (study.out / "clock" / "calls").read_text().split() == [
        f"{variant}/lr0.001-seed{turn}" for turn in (0, 1) for variant in "ab"
    ]
    assert len(accuracies(study.grid, study.out)) == 6
    assert run.remeasure(study, 1, "restart") == 0  # of the variants that are compared, and this grid has none
    assert not (study.out / "restart").exists()


def test_a_run_of_fewer_updates_than_the_grid_now_has_goes_on(study: run.Study) -> None:
    run.run_all(study, options())
    directory = study.directory(Cell("a", 1e-4, 0))
    assert state_of(directory, study.grid.updates) is State.DONE
    longer: Grid = replace(study.grid, updates=8)
    assert state_of(directory, longer.updates) is State.BEGUN


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--part", "nothing"], "study: --part nothing: the grid has headline"),
        (["--grid", "absent.toml"], "study: absent.toml: no such grid"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*arguments, "--out", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


def test_a_dry_run_lists_every_cell_and_the_time_left(study: run.Study, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--grid", str(study.out / "grid.toml"), "--out", str(study.out), "--dry-run"]
    assert run.main(told) == 0
    assert "0 of 6 cells done; no pace known yet" in capsys.readouterr().out
    run.run_all(study, options(cells=["*seed0"]))
    assert run.main(told) == 0
    said = capsys.readouterr().out
    assert "4 of 6 cells done; the rest takes about 2:00" in said
    assert "missing  b/lr0.001-seed1" in said
