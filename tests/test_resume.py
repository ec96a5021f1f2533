"""Runs that are killed or asked to stop: nothing finished is lost, and the end is the unbroken run's."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.run.checkpoints import newest_cursor
from mugrpo_megatron.stages.store import StageStore
from tests.tiny import COIN, save_model, write_recipe

MUGRPO = [sys.executable, "-m", "mugrpo_megatron"]
UPDATES = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def recipe(folder: Path, model: Path, **sections: dict[str, Any]) -> Path:
    """One stage of many small updates, saved every few."""
    folder.mkdir(exist_ok=True)
    schedule = {"stages": 1, "updates_per_stage": UPDATES}
    return write_recipe(
        folder / "recipe.toml",
        model,
        folder / "run",
        schedule=schedule,
        checkpoint={"every_updates": 3},
        reward=COIN,
        **sections,
    )


def start(path: Path) -> subprocess.Popen[str]:
    command = [*MUGRPO, "train", str(path)]
    output = subprocess.PIPE
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(path: Path) -> None:
    done = subprocess.run([*MUGRPO, "train", str(path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def wait_for(process: subprocess.Popen[str], run_dir: Path, kind: str, count: int) -> None:
    """Until the run has logged `count` rows of a kind."""
    log = run_dir / "metrics.jsonl"
    while not log.exists() or sum(row["kind"] == kind for row in read_rows(log)) < count:
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"ended before {count} {kind} rows: {process.stdout.read() if process.stdout else ''}")


def weights(run_dir: Path) -> bytes:
    return (run_dir / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    finish(recipe(folder, model))
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 14, 37])
def test_a_run_killed_while_optimizing_ends_bitwise_like_the_unbroken_one(
    updates: int, unbroken: Path, model: Path, tmp_path: Path
) -> None:
    path = recipe(tmp_path, model)
    shutil.copytree(unbroken / "stages", tmp_path / "run" / "stages")
    with start(path) as process:
        wait_for(process, tmp_path / "run", "update", updates)
        offspring = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    _, alive = psutil.wait_procs(offspring, timeout=30)
    assert alive == []
    logged = sum(row["kind"] == "update" for row in read_rows(tmp_path / "run" / "metrics.jsonl"))
    saved = newest_cursor(tmp_path / "run" / "checkpoints").updates
    finish(path)
    assert weights(tmp_path / "run") == weights(unbroken)
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "update"]
    assert {row["update"] for row in rows} == set(range(UPDATES))
    repeated = len(rows) - UPDATES
    assert repeated == logged - saved, "a resume goes on from the newest checkpoint that was complete"
    assert repeated <= 6, "no more is repeated than the checkpoint before the one under way lacks"


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_0_and_the_run_goes_on(unbroken: Path, model: Path, tmp_path: Path) -> None:
    path = recipe(tmp_path, model)
    shutil.copytree(unbroken / "stages", tmp_path / "run" / "stages")
    with start(path) as process:
        wait_for(process, tmp_path / "run", "update", 7)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        said = process.stdout.read()
    assert process.returncode == 0, said
    assert "stopped as asked" in said
    finish(path)
    rows = [row["update"] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "update"]
    assert rows == list(range(UPDATES)), "nothing is repeated after an orderly stop"
    assert weights(tmp_path / "run") == weights(unbroken)


@pytest.mark.slow
def test_an_engine_killed_while_generating_costs_no_group(model: Path, tmp_path: Path) -> None:
    path = recipe(tmp_path, model, rollout={"prompts_per_update": 64})
    with start(path) as process:
        wait_for(process, tmp_path / "run", "eval", 1)
        children = psutil.Process(process.pid).children()
        engines = [child for child in children if "mugrpo_megatron.engine.host" in child.cmdline()]
        assert len(engines) == 1
        engines[0].kill()
        assert process.stdout is not None
        said = process.stdout.read()
    assert process.returncode == 0, said
    assert "restarted for what is missing" in said
    store = StageStore(tmp_path / "run" / "stages" / "00000")
    assert store.present() == set(range(64 * UPDATES))
    assert [sample.group for sample in store.read_update(1)[::4]] == list(range(64, 128))
