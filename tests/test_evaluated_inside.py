"""Runs that are evaluated inside a stage end bitwise like the run that is not, however they are broken off."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.report.page import write_report
from mugrpo_megatron.run.checkpoints import complete
from tests.scaling.nodes import TORCHRUN
from tests.tiny import COIN, mugrpo, rows, save_model, take_stages, write_recipe

pytestmark = [pytest.mark.process, pytest.mark.slow]

UPDATES, EVERY = 9, 2
INSIDE = [2, 4, 6, 8]
EVERYTHING = [0, *INSIDE, UPDATES]
SAMPLED = {
    "every_updates": EVERY,
    "sets": {"arithmetic": {"samples": 4, "temperature": 1.0}, "arithmetic_long": {"top_p": 0.5, "max_tokens": 9}},
}

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def recipe(folder: Path, model: Path, **sections: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    data = {"eval": "arithmetic,arithmetic_long", "eval_problems": 60}
    schedule = {"stages": 1, "updates_per_stage": UPDATES}
    return write_recipe(
        folder / "recipe.toml", model, folder / "run", data=data, schedule=schedule, reward=COIN, **sections
    )


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is evaluated at its ends alone."""
    folder = tmp_path_factory.mktemp("plain")
    mugrpo("train", recipe(folder, model))
    return folder / "run"


def on_the_same_responses(folder: Path, model: Path, plain: Path, **sections: dict[str, Any]) -> tuple[Path, Path]:
    """Recipe and directory of a run that finds the stage of the plain one sealed: what is sampled differs every time.

    It is evaluated before that stage's first update all the same.
    """
    path = recipe(folder, model, **sections)
    take_stages(plain, folder / "run")
    return path, folder / "run"


def evaluated(run_dir: Path) -> list[int]:
    return [row["update"] for row in rows(run_dir, "eval")]


def learned(run_dir: Path) -> dict[int, dict[str, float]]:
    """What the updates say, without the time that they took; of one taken twice what it said last."""
    clocks = ("time", "seconds", "tflops", "mfu")
    return {row["update"]: {k: v for k, v in row.items() if k not in clocks} for row in rows(run_dir, "update")}


def assert_ends_like(run_dir: Path, plain: Path) -> None:
    """Weights, optimizer state and every update's metrics, bit by bit."""
    weights = "hf/model.safetensors"
    assert (run_dir / weights).read_bytes() == (plain / weights).read_bytes()
    state = f"{complete(plain / 'checkpoints')[-1].relative_to(plain)}/__0_0.distcp"
    assert (run_dir / state).read_bytes() == (plain / state).read_bytes()
    assert learned(run_dir) == learned(plain)


def start(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mugrpo_megatron", "train", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(process.stdout.read() if process.stdout else "")


def inside(run_dir: Path, times: int) -> Callable[[], bool]:
    """Whether the weights have gone to the engine `times` times: the evaluation that it was for is under way."""
    return lambda: sum(row["phase"] == "sync" for row in rows(run_dir, "phase")) >= times


def test_the_plain_run_learns_and_is_evaluated_at_its_ends(plain: Path, model: Path) -> None:
    assert evaluated(plain) == [0, UPDATES]
    assert (plain / "hf" / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()
    assert len(learned(plain)) == UPDATES


@pytest.mark.parametrize("between_stages", ["sleep", pytest.param("restart", marks=pytest.mark.night)])
def test_training_does_not_notice(between_stages: str, plain: Path, model: Path, tmp_path: Path) -> None:
    engine = {"between_stages": between_stages}
    path, run_dir = on_the_same_responses(tmp_path, model, plain, eval=SAMPLED, engine=engine)
    mugrpo("train", path)
    assert_ends_like(run_dir, plain)
    found = rows(run_dir, "eval")
    assert [(row["update"], row["age"]) for row in found] == [(0, 0), *((age, age) for age in INSIDE), (UPDATES, 0)]
    assert all((row["samples/arithmetic"], row["samples/arithmetic_long"]) == (4, 1) for row in found)
    assert all(row["reward/mean"] == (row["reward/arithmetic"] + row["reward/arithmetic_long"]) / 2 for row in found)
    spans = sorted((row["start"], row["end"]) for row in rows(run_dir, "phase") if row["phase"] in ("optimize", "eval"))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), "each in its own time"
    assert write_report(run_dir).stat().st_size > 10_000


@pytest.mark.night
@pytest.mark.parametrize("times", [1, 3])
def test_a_run_killed_while_it_is_evaluated(times: int, plain: Path, model: Path, tmp_path: Path) -> None:
    """It evaluates on resuming, where the checkpoint is older than the evaluation too, and nothing twice."""
    sections: dict[str, dict[str, Any]] = {"eval": SAMPLED, "checkpoint": {"every_updates": 3}}
    path, run_dir = on_the_same_responses(tmp_path, model, plain, **sections)
    with start(path) as process:
        wait_until(inside(run_dir, times), process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert len(evaluated(run_dir)) < len(INSIDE)
    mugrpo("train", path)
    assert evaluated(run_dir) == EVERYTHING
    assert_ends_like(run_dir, plain)


@pytest.mark.night
def test_a_run_asked_to_stop_while_it_is_evaluated(plain: Path, model: Path, tmp_path: Path) -> None:
    many = {**SAMPLED, "samples": 64, "sets": {}}
    path, run_dir = on_the_same_responses(tmp_path, model, plain, eval=many)
    with start(path) as process:
        wait_until(inside(run_dir, 2), process)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        said = process.stdout.read()
    assert process.returncode == 0, said
    assert "stopped as asked" in said
    mugrpo("train", path)
    assert [row["update"] for row in rows(run_dir, "update")] == list(range(UPDATES)), "no update is taken twice"
    assert evaluated(run_dir) == EVERYTHING
    assert_ends_like(run_dir, plain)


@pytest.mark.night
def test_an_engine_killed_while_it_is_evaluated(plain: Path, model: Path, tmp_path: Path) -> None:
    many = {**SAMPLED, "samples": 64, "sets": {}}
    path, run_dir = on_the_same_responses(tmp_path, model, plain, eval=many)
    with start(path) as process:
        wait_until(inside(run_dir, 2), process)
        (engine,) = [
            child
            for child in psutil.Process(process.pid).children()
            if "mugrpo_megatron.engine.host" in child.cmdline()
        ]
        engine.kill()
        assert process.stdout is not None
        said = process.stdout.read()
    assert process.returncode == 0, said
    assert [row["event"] for row in rows(run_dir, "event")] == ["engine_failure"]
    assert evaluated(run_dir) == EVERYTHING
    assert_ends_like(run_dir, plain)


@pytest.mark.night
def test_two_ranks_with_an_engine_each(model: Path, tmp_path: Path) -> None:
    """The first process evaluates at every other update, the second finds its stages and is not evaluated inside."""
    ends: list[Path] = []
    for name, section in (("evaluated", SAMPLED), ("plain", {})):
        path = recipe(tmp_path / name, model, eval=section)
        if ends:
            take_stages(ends[0], tmp_path / name / "run")
        done = subprocess.run([TORCHRUN, "2", "train", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        ends.append(tmp_path / name / "run")
    assert evaluated(ends[0]) == EVERYTHING
    assert_ends_like(ends[0], ends[1])


def test_without_an_engine_nothing_is_evaluated_and_the_command_says_so(
    plain: Path, model: Path, tmp_path: Path
) -> None:
    path, run_dir = on_the_same_responses(tmp_path, model, plain, eval=SAMPLED)
    assert "nothing is evaluated inside the stage" in mugrpo("optimize", path).stdout
    assert evaluated(run_dir) == []
    assert_ends_like(run_dir, plain)
