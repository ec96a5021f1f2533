"""The command on run directories that something happened to: exit 2 with one sentence, and no file is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mugrpo_megatron.run.checkpoints import complete, newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from tests.hostile.rundir import content
from tests.tiny import FINISHED, mugrpo, write_recipe, write_run

pytestmark = pytest.mark.process

MORE = ["--set", f"schedule.stages={FINISHED['stages'] + 1}"]


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, as if it had been killed at the start of its second stage."""
    shutil.copytree(finished_run, tmp_path / "run")
    for path in complete(tmp_path / "run" / "checkpoints"):
        if path.name > "stage00001-age00000":
            shutil.rmtree(path)
    (tmp_path / "run" / "summary.json").unlink()
    write_run(tmp_path, finished_run.parent / "model")
    return tmp_path / "run"


def without_states(run: Path) -> None:
    for path in complete(run / "checkpoints"):
        (path / "state.json").unlink()


def foreign_hf(run: Path) -> None:
    shutil.rmtree(run / "hf")
    (run / "hf").mkdir()
    (run / "hf" / "precious.txt").write_text("mine")


def flipped_behaviour(run: Path) -> None:
    path = run / "stages" / "00001" / "behaviour.parquet"
    data = bytearray(path.read_bytes())
    data[20] ^= 1  # in the first update
    path.write_bytes(data)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "states gone": (without_states, "every checkpoint in"),
    "hf of someone else": (foreign_hf, "was not written by this run"),
}
"""Each by another part of the command; tests/hostile/test_run_directories.py has all of them, in process."""


def test_each_is_refused_before_anything_starts(run: Path, tmp_path: Path) -> None:
    for case, (damage, words) in CASES.items():
        shutil.copytree(run, tmp_path / "damaged")
        damage(tmp_path / "damaged")
        before = content(tmp_path / "damaged")
        said = mugrpo("train", run.parent / "recipe.toml", "--set", f"run.dir={tmp_path / 'damaged'}", code=2)
        assert words in said.stderr, case
        assert "Traceback" not in said.stderr
        assert content(tmp_path / "damaged") == before
        shutil.rmtree(tmp_path / "damaged")


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
    assert "kept as stage00001-age00000.damaged, and the run resumes from stage00000-age00018" in told
    assert newest_cursor(run / "checkpoints") == Cursor(1, 0, FINISHED["updates_per_stage"])
    assert '"event": "damaged_checkpoint"' in (run / "metrics.jsonl").read_text()


def test_the_model_is_never_replaced(finished_run: Path, tmp_path: Path) -> None:
    model = shutil.copytree(finished_run.parent / "model", tmp_path / "run" / "hf")
    before = content(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.toml", Path(model), tmp_path / "run")
    said = mugrpo("train", recipe, code=2)
    assert "is where this run would write its own checkpoint" in said.stderr
    assert content(tmp_path) == before
