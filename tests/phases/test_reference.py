"""Off-policy GRPO's clip on whole runs: it binds once the reference is older than the policy, and a resume keeps it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mugrpo_megatron.run.checkpoints import complete
from tests.phases.branches import optimize
from tests.tiny import FINISHED, rows, weights

pytestmark = [pytest.mark.process, pytest.mark.slow]
UPDATES, EVERY = FINISHED["updates_per_stage"], 10


MOVING = ("objective.name=off_policy_grpo", "optimizer.lr=1e-2")
"""At this learning rate each update moves the policy far."""


def optimized(source: Path, run_dir: Path, *changes: str) -> Path:
    """The first stage of the run in `source`."""
    optimize(source, run_dir, *MOVING, *changes)
    return run_dir


@pytest.fixture(scope="module")
def clipped(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return optimized(finished_run, tmp_path_factory.mktemp("clipped") / "run", f"objective.reference_every={EVERY}")


def clipped_fractions(run_dir: Path) -> list[float]:
    return [row["clipped_fraction"] for row in rows(run_dir, "update")]


def test_the_clip_binds_between_refreshes_and_only_there(finished_run: Path, clipped: Path, tmp_path: Path) -> None:
    moving = optimized(finished_run, tmp_path / "moving")
    assert clipped_fractions(moving) == [0.0] * UPDATES
    found = clipped_fractions(clipped)
    assert found[::EVERY] == [0.0, 0.0], "at a refresh the ratio is exactly the reference's"
    assert all(share > 0 for age, share in enumerate(found) if age % EVERY)
    assert weights(clipped) != weights(moving)
    assert not (moving / "reference").exists()


def test_informative_groups_alone_are_lined_up_with_their_reference(finished_run: Path, tmp_path: Path) -> None:
    """In a wrong order the first update after a refresh would not be at its reference."""
    changes = [f"objective.reference_every={EVERY}", "objective.zero_variance=leave_out"]
    found = clipped_fractions(optimized(finished_run, tmp_path / "run", *changes))
    assert found[::EVERY] == [0.0, 0.0]
    assert max(found) > 0


@pytest.mark.parametrize("age", [12, pytest.param(6, marks=pytest.mark.night)])
def test_a_run_that_resumes_between_refreshes_ends_bitwise_like_the_unbroken_one(
    age: int, finished_run: Path, clipped: Path, tmp_path: Path
) -> None:
    """What a kill after a refresh and a save leaves: checkpoints up to the save, reference files up to the refresh."""
    run_dir = tmp_path / "run"
    shutil.copytree(clipped, run_dir)
    for path in [*complete(run_dir / "checkpoints"), *(run_dir / "reference").iterdir(), run_dir / "hf"]:
        if path.stem > f"stage00000-age{age:05d}" or path.name == "hf":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert [path.name for path in complete(run_dir / "checkpoints")][-1] == f"stage00000-age{age:05d}"
    shutil.copytree(run_dir, tmp_path / "lost")
    optimized(finished_run, run_dir, f"objective.reference_every={EVERY}")
    assert weights(run_dir) == weights(clipped)

    shutil.rmtree(tmp_path / "lost" / "reference")
    refused = optimize(finished_run, tmp_path / "lost", *MOVING, f"objective.reference_every={EVERY}", code=2)
    begun = f"stage00000-age{age - age % EVERY:05d}"
    assert f"{begun}.parquet is missing" in refused.stderr
    assert f"the checkpoints after {begun}" in refused.stderr
    assert "Traceback" not in refused.stderr
