"""Several passes over a stage on whole runs: what they train on, and that a resume at any update changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.report.page import write_report
from mugrpo_megatron.run.checkpoints import complete, newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from tests.tiny import FINISHED, mugrpo

pytestmark = pytest.mark.process
MU = FINISHED["updates_per_stage"]


def optimized(finished_run: Path, run_dir: Path, *changes: str) -> Path:
    """The finished run's first stage optimized in two passes, with a checkpoint at every third update."""
    source = ["--stage", 0, "--from", finished_run] if not run_dir.exists() else []
    overrides = (f"run.dir={run_dir}", "schedule.passes=2", "objective.name=off_policy_grpo", *changes)
    words = [word for one in overrides for word in ("--set", one)]
    mugrpo("optimize", finished_run.parent / "recipe.toml", *source, *words)
    return run_dir


@pytest.mark.slow
def test_a_run_that_resumes_in_the_second_pass_ends_bitwise_like_the_unbroken_one(
    finished_run: Path, tmp_path: Path
) -> None:
    """With references that are refreshed every seven updates, so that one of them serves both passes."""
    changes = ["objective.reference_every=7"]
    whole = optimized(finished_run, tmp_path / "whole", *changes)
    rows = [row for row in read_rows(whole / "metrics.jsonl") if row["kind"] == "update"]
    assert [row["age"] for row in rows] == list(range(2 * MU))
    assert sorted(row["reward_mean"] for row in rows[:MU]) == sorted(row["reward_mean"] for row in rows[MU:])
    assert [row["reward_mean"] for row in rows[:MU]] != [row["reward_mean"] for row in rows[MU:]]
    assert newest_cursor(whole / "checkpoints") == Cursor(1, 0, 2 * MU, repeated=MU)
    assert "passes over each stage" in write_report(whole).read_text(encoding="utf-8")

    broken, age = tmp_path / "broken", MU + 4
    shutil.copytree(whole, broken)
    for path in [*complete(broken / "checkpoints"), *(broken / "reference").iterdir(), broken / "hf"]:
        if path.stem > f"stage00000-age{age:05d}" or path.name == "hf":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert MU < newest_cursor(broken / "checkpoints").age < 2 * MU
    optimized(finished_run, broken, *changes)
    end = "checkpoints/stage00001-age00000/__0_0.distcp"
    assert (broken / end).read_bytes() == (whole / end).read_bytes()
