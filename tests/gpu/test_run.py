"""A whole run on the device that there is, stopped as Slurm stops one, and continued by the same command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.observe.log import read_rows
from tests.gpu.tiny import save_model, sections
from tests.patience import PATIENCE_S
from tests.tiny import COIN, write_recipe

UPDATES = 4


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    log = run / "metrics.jsonl"
    return [row for row in read_rows(log) if row["kind"] == kind] if log.exists() else []


def last_line(log: Path) -> str:
    """Why the command failed, as ten.py's verdict has it."""
    return (log.read_text(encoding="utf-8").strip().splitlines() or [""])[-1]


@pytest.mark.process
@pytest.mark.night
def test_a_run_that_is_stopped_is_continued_to_its_end(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run = tmp_path / "run"
    model = save_model(tmp_path / "model")
    recipe = write_recipe(tmp_path / "recipe.toml", model, run, **sections(reward=COIN))
    command = [sys.executable, "-m", "mugrpo_megatron", "train", str(recipe)]
    with (tmp_path / "train.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not rows(run, "update") and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert rows(run, "update"), last_line(tmp_path / "train.log")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, last_line(tmp_path / "train.log")
        finally:
            process.kill()
            process.wait()
        stopped = len(rows(run, "update"))
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=PATIENCE_S)
    assert done.returncode == 0, last_line(tmp_path / "train.log")
    assert [row["update"] for row in rows(run, "update")] == list(range(UPDATES))
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["updates"] == UPDATES
    for stage in rows(run, "stage"):
        record_property("mismatch, nats", stage["mismatch_mean"])
        assert stage["mismatch_mean"] < 0.02
    record_property("updates before the stop", stopped)
    record_property("seconds of the second start", summary["seconds"])
