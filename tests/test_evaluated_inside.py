"""Runs that are evaluated inside a stage end bitwise like the run that is not, however they are broken off.

`tests/test_resume.py` has one that is stopped and killed.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.report.page import write_report
from mugrpo_megatron.run.checkpoints import complete_checkpoints
from tests.forked import Command, started
from tests.patience import PATIENCE_S
from tests.scaling.nodes import TORCHRUN
from tests.tiny import FINISHED, mugrpo, rows, take_stages, weights, write_run

pytestmark = [pytest.mark.process, pytest.mark.night]

UPDATES, EVERY = FINISHED["updates_per_stage"], 5
INSIDE = [5, 10]
EVERYTHING = [0, *INSIDE, UPDATES, UPDATES + 5, UPDATES + 10, 2 * UPDATES]
SAMPLED = {
    "every_updates": EVERY,
    "sets": {"arithmetic": {"samples": 4, "temperature": 1.0}, "arithmetic_long": {"top_p": 0.5, "max_tokens": 9}},
}
DATA = {"eval": "arithmetic,arithmetic_long", "eval_problems": 60}
CLOCKS = ("time", "seconds", "tflops", "mfu")


def on_the_same_responses(folder: Path, plain: Path, **sections: dict[str, Any]) -> tuple[Path, Path]:
    """Recipe and directory of a run that finds the stages of the plain one sealed: what is sampled differs every time.

    It is evaluated before each stage's first update all the same.
    """
    path = write_run(folder, plain.parent / "model", data=DATA, **sections)
    take_stages(plain, folder / "run")
    return path, folder / "run"


def evaluated(run_dir: Path) -> list[int]:
    return [row["update"] for row in rows(run_dir, "eval")]


def learned(run_dir: Path) -> dict[int, dict[str, float]]:
    """What the updates say, without the time that they took; of one taken twice what it said last."""
    return {row["update"]: {k: v for k, v in row.items() if k not in CLOCKS} for row in rows(run_dir, "update")}


def assert_ends_like(run_dir: Path, plain: Path) -> None:
    """Weights, optimizer state and every update's metrics, bit by bit."""
    assert weights(run_dir) == weights(plain)
    state = f"{complete_checkpoints(plain / 'checkpoints')[-1].relative_to(plain)}/__0_0.distcp"
    assert (run_dir / state).read_bytes() == (plain / state).read_bytes()
    assert learned(run_dir) == learned(plain)


@contextmanager
def while_it_is_evaluated(path: Path, run_dir: Path, times: int) -> Iterator[Command]:
    """The run whose weights have gone to the engine `times` times: the evaluation that it was for is under way."""
    with started("train", path, real_engine=True) as command:
        while sum(row["phase"] == "sync" for row in rows(run_dir, "phase")) < times:
            assert command.wait(0.02) is None, command.said
        yield command


@pytest.mark.parametrize("between_stages", ["sleep", "restart"])
def test_training_does_not_notice(between_stages: str, finished_run: Path, tmp_path: Path) -> None:
    engine = {"between_stages": between_stages}
    path, run_dir = on_the_same_responses(tmp_path, finished_run, eval=SAMPLED, engine=engine)
    mugrpo("train", path)
    assert_ends_like(run_dir, finished_run)
    found = rows(run_dir, "eval")
    assert [row["update"] for row in found] == EVERYTHING
    assert [row["age"] for row in found] == [0, *INSIDE, 0, *INSIDE, 0]
    assert all((row["samples/arithmetic"], row["samples/arithmetic_long"]) == (4, 1) for row in found)
    assert all(row["reward/mean"] == (row["reward/arithmetic"] + row["reward/arithmetic_long"]) / 2 for row in found)
    spans = sorted((row["start"], row["end"]) for row in rows(run_dir, "phase") if row["phase"] in ("optimize", "eval"))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), "each in its own time"
    assert write_report(run_dir).stat().st_size > 10_000


@pytest.mark.parametrize("times", [1, 3])
def test_a_run_killed_while_it_is_evaluated(times: int, finished_run: Path, tmp_path: Path) -> None:
    """It evaluates on resuming, where the checkpoint is older than the evaluation too, and nothing twice."""
    path, run_dir = on_the_same_responses(tmp_path, finished_run, eval=SAMPLED)
    with while_it_is_evaluated(path, run_dir, times) as command:
        family = command.offspring
        command.process.kill()
        command.wait()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []
    assert len(evaluated(run_dir)) <= times
    mugrpo("train", path)
    assert evaluated(run_dir) == EVERYTHING
    assert_ends_like(run_dir, finished_run)


def test_a_run_asked_to_stop_while_it_is_evaluated(finished_run: Path, tmp_path: Path) -> None:
    many = {**SAMPLED, "samples": 64, "temperature": 1.0, "sets": {}}
    path, run_dir = on_the_same_responses(tmp_path, finished_run, eval=many)
    with while_it_is_evaluated(path, run_dir, 2) as command:
        psutil.Process(command.pid).send_signal(signal.SIGTERM)
        assert command.wait() == 0, command.said
        assert "stopped as asked" in command.stdout
    mugrpo("train", path)
    assert [row["update"] for row in rows(run_dir, "update")] == list(range(2 * UPDATES)), "no update is taken twice"
    assert evaluated(run_dir) == EVERYTHING
    assert_ends_like(run_dir, finished_run)


def test_an_engine_killed_while_it_is_evaluated(finished_run: Path, tmp_path: Path) -> None:
    many = {**SAMPLED, "samples": 64, "temperature": 1.0, "sets": {}}
    path, run_dir = on_the_same_responses(tmp_path, finished_run, eval=many)
    with while_it_is_evaluated(path, run_dir, 2) as command:
        [engine] = command.hosts
        engine.kill()
        assert command.wait() == 0, command.said
    assert [row["event"] for row in rows(run_dir, "event")] == ["engine_failure"]
    assert evaluated(run_dir) == EVERYTHING
    assert_ends_like(run_dir, finished_run)


def test_two_ranks_with_an_engine_each(finished_run: Path, tmp_path: Path) -> None:
    """The first process evaluates at every fifth update, the second finds its stages and is not evaluated inside."""
    ends: list[Path] = []
    for name, section in (("evaluated", SAMPLED), ("plain", {})):
        path = write_run(tmp_path / name, finished_run.parent / "model", data=DATA, eval=section)
        if ends:
            take_stages(ends[0], tmp_path / name / "run")
        done = subprocess.run([TORCHRUN, "2", "train", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        ends.append(tmp_path / name / "run")
    assert evaluated(ends[0]) == EVERYTHING
    assert_ends_like(ends[0], ends[1])
