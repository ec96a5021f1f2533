"""Training time until an evaluation: against runs whose parts are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.observe.rundata import read_run
from run_scripts.bench.clock import CPU, WALL, CpuClock, CpuMeter, arrival, points, read_cpu_clock
from tests.report.synthetic import recipe_of, rows_of, write_run


def test_points_are_at_the_seconds_of_training_only(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, rows_of(4, 8), recipe_of(4, 8)))
    start, end = run.phases[0]["start"], run.phases[-1]["end"]
    twice = CpuClock((start, end), (0.0, 2 * (end - start)), (0.0, 0.0))  # two busy cores
    found = points(run, twice)
    assert [point[0] for point in found] == [0, 8, 16, 24, 32]
    stage = 0.05 + 0.1 + 8 * 0.16 + 0.2 + 8 * 0.2 + 0.15  # sync, score, generate, optimize, save
    assert found[2][WALL] - found[1][WALL] == pytest.approx(stage, abs=0.1)
    assert all(point[CPU] == pytest.approx(2 * point[WALL], abs=0.3) for point in found)
    assert [point[CPU] for point in points(run, None)] == [None] * 5


def test_a_resumed_run_adds_up_its_processes(tmp_path: Path) -> None:
    rows = [(0, 0.0, 0.0), (10, 8.0, 2.0), (100, 0.0, 0.0), (105, 5.0, 1.0)]
    text = "".join(json.dumps({"time": t, "cpu": cpu, "others": others}) + "\n" for t, cpu, others in rows)
    (tmp_path / "cpu.jsonl").write_text(text)
    clock = read_cpu_clock(tmp_path)
    assert clock is not None
    assert [clock(t) for t in (0, 5, 10, 50, 102.5, 200)] == [0.0, 4.0, 8.0, 8.0, 10.5, 13.0]
    assert clock.others_share() == pytest.approx(3 / 16)


@pytest.mark.process
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


@given(st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=8), st.floats(0, 1, allow_nan=False))
def test_a_level_is_reached_between_the_points_that_enclose_it(ys: list[float], level: float) -> None:
    there = arrival([[0, float(x), None, y] for x, y in enumerate(ys)], level, WALL)
    if there is None:
        assert max(ys) < level
    else:
        before, after = int(there), min(int(there) + 1, len(ys) - 1)
        assert all(y < level for y in ys[: before + (there > before)])
        assert max(ys[before], ys[after]) >= level


def test_a_curve_is_straight_between_its_points() -> None:
    assert arrival([[0, 0.0, 1.0, 0.4], [8, 10.0, 2.0, 0.6], [16, 20.0, 3.0, 0.5]], 0.55, WALL) == pytest.approx(7.5)
    assert arrival([[0, None, 1.0, 0.4], [8, None, 3.0, 0.6]], 0.5, CPU) == pytest.approx(2.0)
