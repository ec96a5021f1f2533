"""Whole runs with a reference policy, a proximal policy that is refreshed and several passes: what they train on,
and a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mugrpo_megatron.report.page import write_report
from mugrpo_megatron.run.checkpoints import complete_checkpoints, newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from tests.phases.branches import optimize
from tests.tiny import FINISHED, rows, weights

pytestmark = [pytest.mark.process, pytest.mark.slow]
MU, EVERY = FINISHED["updates_per_stage"], 6

MOVING = ("objective.name=off_policy_grpo", "optimizer.lr=1e-2")
"""At this learning rate each update moves the policy far."""
CLIPPED = (*MOVING, f"objective.proximal_every={EVERY}")
EPOCHS = (*CLIPPED, "schedule.epochs=2")
"""So that one proximal policy serves both passes."""
REF, HELD = "objective.kl_ref=start", "objective.kl_coef=0.5"


@pytest.fixture(scope="module")
def whole(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first stage of the finished run in two passes, clipped around a proximal policy and held near its first
    weights."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    optimize(finished_run, run_dir, *EPOCHS, REF, HELD)
    return run_dir


def column(run_dir: Path, name: str) -> list[float]:
    return [row[name] for row in rows(run_dir, "update")]


def test_later_passes_take_the_same_updates_in_another_order(whole: Path) -> None:
    assert column(whole, "age") == list(range(2 * MU))
    rewards = column(whole, "reward_mean")
    assert sorted(rewards[:MU]) == sorted(rewards[MU:])
    assert rewards[:MU] != rewards[MU:]
    assert newest_cursor(whole / "checkpoints") == Cursor(1, 0, 2 * MU, repeated=MU)
    assert "epochs over each stage" in write_report(whole).read_text(encoding="utf-8")


def test_the_clip_binds_between_refreshes_and_only_there(finished_run: Path, whole: Path, tmp_path: Path) -> None:
    """Informative groups alone are lined up with it: else the first update after a refresh would not be at it.

    The samples are the engine's and differ from run to run: one update need not move the next one's tokens to the clip.
    """
    optimize(finished_run, tmp_path / "informative", *CLIPPED, "objective.zero_variance=leave_out")
    for run_dir in (whole, tmp_path / "informative"):
        shares = column(run_dir, "clipped_fraction")
        assert set(shares[::EVERY]) == {0.0}, "at a refresh the ratio is exactly the proximal policy's"
        assert max(shares) > 0
    first_pass = column(whole, "clipped_fraction")[:MU]
    assert all(max(first_pass[refresh : refresh + EVERY]) > 0 for refresh in range(0, MU, EVERY))


def test_a_run_stays_near_its_ref(finished_run: Path, whole: Path, tmp_path: Path) -> None:
    """The stage's first weights cost no pass where the learner has scored it; a directory may hold any weights."""
    free, stage, towards, away = (tmp_path / name for name in ("free", "stage", "towards", "away"))
    optimize(finished_run, free, *EPOCHS, REF)
    assert column(whole, "kl_ref")[0] == column(whole, "kl_ref_k1")[0] == 0.0
    assert [column(whole, name)[0] == column(free, name)[0] for name in ("loss", "grad_norm")] == [True, True]
    assert 0 < sum(column(whole, "kl_ref")) < sum(column(free, "kl_ref"))
    assert (whole / "ref" / "stage00000.parquet").exists()

    optimize(finished_run, stage, *EPOCHS, "objective.kl_ref=stage", HELD)
    assert column(stage, "kl_ref") == column(whole, "kl_ref")
    assert not (stage / "ref").exists()

    for run_dir, pull in ((towards, 50), (away, 0)):
        optimize(finished_run, run_dir, *MOVING, f"objective.kl_ref={stage / 'hf'}", f"objective.kl_coef={pull}")
    assert column(towards, "kl_ref")[0] == column(away, "kl_ref")[0] > 0
    assert sum(column(towards, "kl_ref")) < sum(column(away, "kl_ref")), "with the same samples, update by update"
    assert column(towards, "clipped_fraction") == [0.0] * MU, "without a proximal policy nothing is clipped"
    assert not (towards / "proximal").exists()
    refused = optimize(finished_run, tmp_path / "wrong", f"objective.kl_ref={tmp_path}", code=2)
    assert 'name the directory of a checkpoint like the model\'s, or "start" or "stage"' in refused.stderr


def test_a_run_that_resumes_in_the_second_pass_ends_bitwise_like_the_unbroken_one(
    finished_run: Path, whole: Path, tmp_path: Path
) -> None:
    """What a kill between two refreshes leaves; the reference policy's pass is lost, its weights are not."""
    run_dir, age = tmp_path / "run", MU + 3
    shutil.copytree(whole, run_dir)
    for path in [*complete_checkpoints(run_dir / "checkpoints"), *(run_dir / "proximal").iterdir()]:
        if path.stem > f"stage00000-age{age:05d}":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(run_dir / "hf")
    assert newest_cursor(run_dir / "checkpoints").age == age
    shutil.copytree(run_dir, tmp_path / "lost")
    shutil.rmtree(run_dir / "ref")
    optimize(finished_run, run_dir, *EPOCHS, REF, HELD)
    assert weights(run_dir) == weights(whole)
    end = "checkpoints/stage00001-age00000/__0_0.distcp"
    assert (run_dir / end).read_bytes() == (whole / end).read_bytes()

    shutil.rmtree(tmp_path / "lost" / "proximal")
    refused = optimize(finished_run, tmp_path / "lost", *EPOCHS, REF, HELD, code=2).stderr
    begun = f"stage00000-age{age - age % EVERY:05d}"
    assert f"{begun}.parquet is missing" in refused
    assert f"the checkpoints after {begun}" in refused
    assert "Traceback" not in refused
