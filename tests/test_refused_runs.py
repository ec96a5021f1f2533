"""The command on a damaged run directory; tests/hostile/test_run_directories.py has every damage, in process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mugrpo_megatron.run.checkpoints import complete_checkpoints, newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from tests.tiny import FINISHED, mugrpo, write_run

pytestmark = pytest.mark.process


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, as if it had been killed at the start of its second stage."""
    shutil.copytree(finished_run, tmp_path / "run")
    for path in complete_checkpoints(tmp_path / "run" / "checkpoints"):
        if path.name > "stage00001-age00000":
            shutil.rmtree(path)
    (tmp_path / "run" / "summary.json").unlink()
    write_run(tmp_path, finished_run.parent / "model")
    return tmp_path / "run"


def flipped_behaviour(run: Path) -> None:
    path = run / "stages" / "00001" / "behaviour.parquet"
    data = bytearray(path.read_bytes())
    data[20] ^= 1  # in the first update
    path.write_bytes(data)


def test_damaged_logprobs_and_damaged_checkpoints_are_told(run: Path) -> None:
    """A flipped byte of what the update trains on ends the command; a damaged checkpoint is passed over aloud."""
    whole = (run / "stages" / "00001" / "behaviour.parquet").read_bytes()
    flipped_behaviour(run)
    said = mugrpo("optimize", run.parent / "recipe.toml", code=2)
    assert "behaviour.parquet: damaged, bytes" in said.stderr
    (run / "stages" / "00001" / "behaviour.parquet").write_bytes(whole)
    (run / "checkpoints" / "stage00001-age00000" / "state.json").unlink()
    told = mugrpo("optimize", run.parent / "recipe.toml").stdout
    assert "has no state.json" in told
    assert "kept as stage00001-age00000.damaged, and the run resumes from stage00000-age00009" in told
    assert newest_cursor(run / "checkpoints") == Cursor(1, 0, FINISHED["updates_per_stage"])
    assert '"event": "damaged_checkpoint"' in (run / "metrics.jsonl").read_text()
