"""Phases run apart and stages optimized again: the weights that `mugrpo train` leaves, or a clear refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.commands.training import generate_alone, optimize_alone
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.report.page import write_report
from mugrpo_megatron.run.branch import branch_stage
from mugrpo_megatron.run.checkpoints import complete_checkpoints, newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from tests.refusals import refuses
from tests.tiny import COIN, mugrpo, save_model, weights, write_recipe

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_phases_apart_leave_what_train_leaves(tmp_path: Path) -> None:
    """The first stage is generated and optimized by commands of their own, the second by `mugrpo train`."""
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        save_model(tmp_path / "model"),
        tmp_path / "run",
        schedule={"stages": 2, "updates_per_stage": 3},
        reward=COIN,
    )
    assert "mugrpo optimize" in mugrpo("generate", recipe, "--stage", "0").stdout
    generate_alone(load_recipe(recipe), None, None)  # returns at once: a sealed stage is not generated twice
    refuses("is at stage 0", generate_alone, load_recipe(recipe), 1, None)
    mugrpo("optimize", recipe)
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()
    refuses("mugrpo generate", optimize_alone, load_recipe(recipe), None)
    mugrpo("train", recipe)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["update"] for row in rows if row["kind"] == "update"] == list(range(6))
    assert [path.name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "stage00001-age00000",
        "stage00002-age00000",
    ]
    refuses("taken all of its 6 updates", optimize_alone, load_recipe(recipe), None)


def branched(finished_run: Path, stage: int, target: Path, *changes: str, code: int = 0) -> str:
    """`mugrpo optimize` of a stage of the finished run in a directory of its own; what it printed."""
    command = ["optimize", finished_run.parent / "recipe.toml", "--stage", stage, "--from", finished_run]
    overrides = [word for change in (f"run.dir={target}", *changes) for word in ("--set", change)]
    process = mugrpo(*command, *overrides, code=code)
    return process.stdout + process.stderr


@pytest.mark.parametrize("stage", [0, 1])
def test_a_branch_with_the_same_objective_ends_bitwise_like_its_source(
    stage: int, finished_run: Path, tmp_path: Path
) -> None:
    """Stage 1 begins from a checkpoint, stage 0 from the model; each gives back what the run had after it."""
    branched(finished_run, stage, tmp_path / "b")
    if stage == 1:
        assert weights(tmp_path / "b") == weights(finished_run)
    else:
        end = "checkpoints/stage00001-age00000/__0_0.distcp"
        assert (tmp_path / "b" / end).read_bytes() == (finished_run / end).read_bytes()
    stages = f"stages/{stage:05d}/stage.parquet"
    assert (tmp_path / "b" / stages).samefile(finished_run / stages), "hard links, no bytes are copied"
    assert write_report(tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("stage", "source", "changed", "words"),
    [
        (None, "run", [], "needs --stage"),
        (7, "run", [], "no sealed stage 7"),
        (0, "nowhere", [], "not a run directory"),
        (0, "run", ["rollout.temperature=0.5"], "rollout.temperature"),
        (0, "run", ["run.seed=9"], "run.seed"),
        (0, "run", ["data.max_prompt_tokens=7"], "data.max_prompt_tokens"),
        (0, "run", ["reward.overlong_buffer_tokens=8"], "reward.overlong_buffer_tokens"),
        (0, "run", ["run.dir={run}"], "is the run of --from itself"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(
    stage: int | None, source: str, changed: list[str], words: str, finished_run: Path, tmp_path: Path
) -> None:
    overrides = [f"run.dir={tmp_path / 'b'}", *(one.format(run=finished_run) for one in changed)]
    recipe, origin = load_recipe(finished_run.parent / "recipe.toml", overrides), finished_run.parent / source
    with pytest.raises(UserError, match=words):
        optimize_alone(recipe, branch_stage(origin, stage), origin)


def test_an_exhausted_stage_ends_early(finished_run: Path, tmp_path: Path) -> None:
    """The first update is on policy, the second no longer."""
    output = branched(finished_run, 0, tmp_path / "b", "schedule.max_kl=1e-12")
    assert "stage 0 ends after 2 updates: the policy has moved " in output
    assert newest_cursor(tmp_path / "b" / "checkpoints") == Cursor(stage=1, age=0, updates=2)
    rows = [row for row in read_rows(tmp_path / "b" / "metrics.jsonl") if row["kind"] == "update"]
    assert [row["age"] for row in rows] == [0, 1]


def test_too_many_skipped_updates_end_the_run_with_its_state_and_the_batch(finished_run: Path, tmp_path: Path) -> None:
    """At this learning rate the first step leaves nothing finite behind."""
    said = branched(finished_run, 0, tmp_path / "b", "optimizer.lr=1e30", code=1)
    assert "10 updates in a row" in said
    assert "Traceback" not in said
    [batch] = (tmp_path / "b" / "poisoned").iterdir()
    assert batch.name == "stage00000-age00010.parquet"
    assert max(path.name for path in complete_checkpoints(tmp_path / "b" / "checkpoints")) == "stage00000-age00011"
