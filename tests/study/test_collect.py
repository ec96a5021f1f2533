"""From run directories to the kept results: seconds and accuracies are those of the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from mugrpo_megatron.report.rundata import read_run
from mugrpo_megatron.report.summary import summarize
from run_scripts.study import collect, tables, timing
from run_scripts.study import run as study
from run_scripts.study.grid import Cell, Grid, load_grid
from run_scripts.study.processes import CpuMeter, read_cpu_clock
from run_scripts.study.results import CPU, RESTART, WALL, read_results
from tests.report.synthetic import recipe_of, rows_of, write_run

pytestmark = [pytest.mark.night, pytest.mark.process]

GRID = """
updates = 16
rates = [1e-4, 1e-3]
reference = "mu_grpo"
[headline]
title = "Main"
seeds = 2
[headline.variants]
grpo = { title = "GRPO", mu = 4, objective = { name = "grpo" } }
mu_grpo = { title = "mu-GRPO", mu = 8, objective = { name = "mu_grpo" } }
"""


def make_cell(out: Path, name: str, stages: int, updates: int, seed: int = 0) -> Path:
    """A finished cell whose processes used twice its wall-clock in processor time, and the others a fifth of that."""
    rows = rows_of(stages, updates, seed=seed)
    directory = write_run(out / name, rows, recipe_of(stages, updates))
    (directory / "summary.json").write_text(json.dumps(summarize(directory)))
    begin, end = rows[0]["time"], rows[-1]["end"]
    samples = [{"time": begin + t, "cpu": 2 * t, "others": 0.4 * t} for t in range(int(end - begin) + 2)]
    (directory / "cpu.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return directory


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    (tmp_path / "grid.toml").write_text(GRID)
    return load_grid(tmp_path / "grid.toml")


def test_a_row_holds_the_run_without_start_up_and_evaluations(tmp_path: Path) -> None:
    directory = make_cell(tmp_path, "mu_grpo/lr0.001-seed3", 2, 8)
    run = read_run(directory)
    row = collect.row_of(run, read_cpu_clock(directory))
    seconds = {
        phase: sum(r["end"] - r["start"] for r in run.phases if r["phase"] == phase) for phase in ("eval", "start")
    }
    assert row["wall_s"] == pytest.approx(run.seconds - seconds["eval"] - seconds["start"], abs=0.7)
    assert row["cpu_s"] == pytest.approx(2 * row["wall_s"], rel=0.02)
    assert row["others_share"] == pytest.approx(0.4 / 2.4, abs=1e-3)
    assert (row["variant"], row["rate"], row["seed"], row["updates"]) == ("mu_grpo", 1e-3, 3, 16)
    assert row["accuracy"] == pytest.approx(run.evals[-1]["accuracy/mean"], abs=1e-4)
    assert set(row) | {"kind", "part", "mu"} == set(collect.COLUMNS)


def test_evaluations_stand_where_training_had_come_to(tmp_path: Path) -> None:
    directory = make_cell(tmp_path, "mu_grpo/lr0.001-seed0", 4, 8)
    run = read_run(directory)
    points = collect.curve_of(run, read_cpu_clock(directory), updates=True)["evals"]
    assert [point[0] for point in points] == [0, 8, 16, 24, 32]
    assert points[0][WALL] == pytest.approx(0.05, abs=0.05)  # after the first sync
    stage = 0.05 + 0.1 + 8 * 0.16 + 0.2 + 8 * 0.2 + 0.15  # sync, score, generate, optimize, save
    assert points[2][WALL] - points[1][WALL] == pytest.approx(stage, abs=0.1)
    assert all(point[CPU] == pytest.approx(2 * point[WALL], abs=0.3) for point in points)


def test_saves_inside_optimizing_are_not_counted_twice(tmp_path: Path) -> None:
    directory = make_cell(tmp_path, "mu_grpo/lr0.001-seed0", 1, 8)
    run = read_run(directory)
    before = collect.row_of(run, None)
    optimize = next(row for row in run.phases if row["phase"] == "optimize")
    run.phases.append({"phase": "save", "stage": 0, "start": optimize["end"] - 0.5, "end": optimize["end"]})
    after = collect.row_of(run, None)
    assert before["optimize_s"] - after["optimize_s"] == pytest.approx(0.5, abs=0.02)


def test_cells_of_two_warm_starts_are_refused(tmp_path: Path, grid: Grid, capsys: pytest.CaptureFixture[str]) -> None:
    docs = tmp_path / "docs" / "study"
    arguments = ["--out", str(tmp_path / "runs"), "--grid", str(tmp_path / "grid.toml"), "--docs", str(docs)]
    make_cell(tmp_path / "runs", "grpo/lr0.001-seed0", 4, 4)
    assert collect.main(arguments) == 0
    before = (docs / "cells.csv").read_text()
    kept = float(read_results(grid, docs).rows[0]["accuracy_before"])
    (docs / "cells.csv").write_text(before.replace(f",{kept},", f",{kept + 0.1},").replace(",0.001,0,", ",0.0001,0,"))
    (docs / "curves.json").write_text((docs / "curves.json").read_text().replace("lr0.001", "lr0.0001"))
    assert collect.main(arguments) == 2
    assert "different warm starts" in capsys.readouterr().err
    assert collect.main([*arguments, "--drop-kept"]) == 0
    assert (docs / "cells.csv").read_text() == before


def test_every_rate_has_a_mean_over_the_seeds_that_ran_there(tmp_path: Path, grid: Grid) -> None:
    out, docs = tmp_path / "runs", tmp_path / "docs"
    for seed in (0, 1):
        make_cell(out, f"grpo/lr0.001-seed{seed}", 4, 4, seed=seed)
    collect.main(["--out", str(out), "--grid", str(tmp_path / "grid.toml"), "--docs", str(docs)])
    results = read_results(grid, docs)
    ends = results.at("grpo", 1e-3)
    mean = tables.seeds_mean(results, "grpo", 1e-3)
    assert mean
    assert mean.n == 2
    assert mean.value == pytest.approx(sum(ends.values()) / 2)
    assert tables.by_rate(results, ["grpo", "mu_grpo", "unknown"]).splitlines()[2:] == [
        f"| GRPO | 4 | {tables.percent(mean)} |"
    ]


def test_kept_cells_stay_and_need_not_run_again(tmp_path: Path, grid: Grid, capsys: pytest.CaptureFixture[str]) -> None:
    """As long as the grid defines them the same way."""
    docs, path = tmp_path / "docs", tmp_path / "grid.toml"
    for turn, name in enumerate(("grpo/lr0.001-seed0", "mu_grpo/lr0.001-seed0")):
        out = tmp_path / f"runs{turn}"
        make_cell(out, name, 16 // (4 + 4 * turn), 4 + 4 * turn)
        collect.main(["--out", str(out), "--grid", str(path), "--docs", str(docs)])
    assert set(read_results(grid, docs).accuracies()) == {Cell("grpo", 1e-3, 0), Cell("mu_grpo", 1e-3, 0)}
    told = ["--grid", str(path), "--out", str(tmp_path / "elsewhere"), "--kept", str(docs), "--dry-run"]
    assert study.main(told) == 0
    said = capsys.readouterr().out
    assert "2 of 6 cells done" in said
    assert "missing  grpo/lr0.0001-seed0" in said
    path.write_text(GRID.replace('title = "mu-GRPO", mu = 8', 'title = "mu-GRPO", mu = 16'))
    collect.main(["--out", str(tmp_path / "runs0"), "--grid", str(path), "--docs", str(docs)])
    assert set(read_results(load_grid(path), docs).accuracies()) == {Cell("grpo", 1e-3, 0)}
    collect.main(["--out", str(tmp_path / "none"), "--grid", str(path), "--docs", str(docs), "--drop-kept"])
    assert read_results(load_grid(path), docs).rows == []


def test_a_clock_run_replaces_the_wall_clock_and_nothing_else(tmp_path: Path, grid: Grid) -> None:
    out, docs = tmp_path / "runs", tmp_path / "docs"
    for rate in grid.rates:
        make_cell(out, f"grpo/lr{rate:g}-seed0", 4, 4)
    before, _ = collect.collect(grid, out)
    best = max(before, key=lambda row: (row["accuracy"], -row["rate"]))["rate"]
    make_cell(out / "clock", f"grpo/lr{best:g}-seed0", 4, 4, seed=9)
    collect.main(["--out", str(out), "--grid", str(tmp_path / "grid.toml"), "--docs", str(docs)])
    results = read_results(grid, docs)
    assert [row["kind"] for row in results.tuned("grpo", "clock")] == ["clock"]
    assert [row["kind"] for row in results.tuned("grpo")] == ["study"]


def test_runs_with_an_engine_that_ends_are_compared_with_those_with_one_that_sleeps(tmp_path: Path, grid: Grid) -> None:
    out, docs = tmp_path / "runs", tmp_path / "docs"
    for name, stages, updates in (("grpo", 4, 4), ("mu_grpo", 2, 8)):
        for root in (out, out / "clock"):
            for rate in grid.rates:
                make_cell(root, f"{name}/lr{rate:g}-seed0", stages, updates)
    path = tmp_path / "grid.toml"
    for name, stages, updates in (("grpo", 4, 4), ("mu_grpo", 2, 8)):
        for rate in grid.rates:
            make_cell(out / "restart", f"{name}/lr{rate:g}-seed0", stages, updates)
    collect.main(["--out", str(out), "--grid", str(path), "--docs", str(docs)])
    results = read_results(grid, docs)
    assert [row["kind"] for row in results.rows] == ["study"] * 4 + ["clock"] * 4 + ["restart"] * 4
    lines = [line.split(" | ") for line in timing.restart_table(results).splitlines()[2:]]
    assert [line[0].strip("| ") for line in lines] == ["sleeps", "sleeps", "ends", "ends"]
    assert [line[3] for line in lines] == ["4", "2", "4", "2"]
    assert lines[0][4:] == lines[2][4:]  # of the same synthetic run
    (grpo,) = results.tuned("grpo", RESTART)
    assert float(lines[2][6]) == pytest.approx(grpo["wall_s"], abs=0.05)


def test_a_resumed_run_adds_up_its_processes(tmp_path: Path) -> None:
    rows = [(0, 0.0, 0.0), (10, 8.0, 2.0), (100, 0.0, 0.0), (105, 5.0, 1.0)]
    text = "".join(json.dumps({"time": t, "cpu": cpu, "others": others}) + "\n" for t, cpu, others in rows)
    (tmp_path / "cpu.jsonl").write_text(text)
    clock = read_cpu_clock(tmp_path)
    assert clock is not None
    assert [clock(t) for t in (0, 5, 10, 50, 102.5, 200)] == [0.0, 4.0, 8.0, 8.0, 10.5, 13.0]
    assert clock.others_share() == pytest.approx(3 / 16)


def test_the_meter_counts_a_process_and_its_children(tmp_path: Path) -> None:
    """The child burns processor time in a child of its own, says so and waits."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True); input()"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE) as process:
        meter = CpuMeter(psutil.Process(process.pid), tmp_path / "cpu.jsonl")
        meter.sample()
        assert process.stdout
        process.stdout.readline()
        meter.sample()
        process.communicate(b"\n")
    clock = read_cpu_clock(tmp_path)
    assert clock is not None
    assert clock.cpu[-1] - clock.cpu[0] >= 0.25
