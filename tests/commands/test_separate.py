"""Phases run apart and stages optimized again: the weights that `mugrpo train` leaves, or a clear refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.commands.separate import generate_alone, optimize_alone
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.report.report import write_report
from mugrpo_megatron.run.checkpoints import complete, newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from tests.tiny import COIN, mugrpo, save_model, write_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose first stage was generated and optimized by commands of their own, the second by `mugrpo train`."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(
        folder / "recipe.toml",
        save_model(folder / "model"),
        folder / "run",
        schedule={"stages": 2, "updates_per_stage": 3},
        checkpoint={"keep": 5},
        reward=COIN,
    )
    assert "mugrpo optimize" in mugrpo("generate", recipe, "--stage", "0").stdout
    generate_alone(load_recipe(recipe), None)  # returns at once: a sealed stage is not generated twice
    with pytest.raises(UserError, match="stands at stage 0"):
        generate_alone(load_recipe(recipe), 1)
    mugrpo("optimize", recipe)
    assert (folder / "run" / "hf" / "model.safetensors").exists()
    with pytest.raises(UserError, match="mugrpo generate"):
        optimize_alone(load_recipe(recipe), None)
    mugrpo("train", recipe)
    return recipe


def weights(run_dir: Path) -> bytes:
    return (run_dir / "hf" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_phases_apart_leave_what_train_leaves(trained: Path) -> None:
    rows = read_rows(trained.parent / "run" / "metrics.jsonl")
    assert [row["update"] for row in rows if row["kind"] == "update"] == list(range(6))
    assert [path.name for path in complete(trained.parent / "run" / "checkpoints")] == [
        "stage00001-age00000",
        "stage00002-age00000",
    ]
    with pytest.raises(UserError, match="taken all of its 6 updates"):
        optimize_alone(load_recipe(trained), None)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_branch_with_the_same_objective_ends_bitwise_like_its_source(
    stage: int, trained: Path, tmp_path: Path
) -> None:
    """Stage 1 begins from a checkpoint, stage 0 from the model; each gives back what the run had after it."""
    source = trained.parent / "run"
    command = ["optimize", trained, "--stage", str(stage), "--from", source, "--set", f"run.dir={tmp_path / 'b'}"]
    mugrpo(*command)
    if stage == 1:
        assert weights(tmp_path / "b") == weights(source)
    else:
        end = "checkpoints/stage00001-age00000/__0_0.distcp"
        assert (tmp_path / "b" / end).read_bytes() == (source / end).read_bytes()
    stages = f"stages/{stage:05d}/stage.parquet"
    assert (tmp_path / "b" / stages).samefile(source / stages), "hard links, no bytes are copied"
    assert write_report(tmp_path / "b").exists()


@pytest.mark.slow
def test_another_objective_on_the_same_stage_ends_elsewhere(trained: Path, tmp_path: Path) -> None:
    source = trained.parent / "run"
    changed = ["--set", "objective.name=dr_grpo", "--set", f"run.dir={tmp_path / 'b'}"]
    mugrpo("optimize", trained, "--stage", "1", "--from", source, *changed)
    assert weights(tmp_path / "b") != weights(source)


@pytest.mark.parametrize(
    ("stage", "source", "changed", "words"),
    [
        (None, "run", [], "needs --stage"),
        (7, "run", [], "no sealed stage 7"),
        (0, "nowhere", [], "no run directory"),
        (0, "run", ["rollout.temperature=0.5"], "rollout.temperature"),
        (0, "run", ["run.seed=9"], "run.seed"),
        (0, "run", ["data.generated_problems=7"], "data.generated_problems"),
        (0, "run", ["reward.format_weight=0.5"], "reward.format_weight"),
        (0, "run", ["run.dir={run}"], "holds a run already"),
    ],
)
@pytest.mark.slow
def test_a_branch_that_cannot_be_is_refused(
    stage: int | None, source: str, changed: list[str], words: str, trained: Path, tmp_path: Path
) -> None:
    overrides = [f"run.dir={tmp_path / 'b'}", *(one.format(run=trained.parent / "run") for one in changed)]
    with pytest.raises(UserError, match=words):
        optimize_alone(load_recipe(trained, overrides), stage, trained.parent / source)


@pytest.mark.slow
def test_a_worn_out_stage_ends_early(trained: Path, tmp_path: Path) -> None:
    """The first update is on policy, the second no longer."""
    changed = ["--set", "schedule.min_ess=0.9999999", "--set", f"run.dir={tmp_path / 'b'}"]
    mugrpo("optimize", trained, "--stage", "0", "--from", trained.parent / "run", *changed)
    assert newest_cursor(tmp_path / "b" / "checkpoints") == Cursor(stage=1, age=0, updates=2)
    rows = [row for row in read_rows(tmp_path / "b" / "metrics.jsonl") if row["kind"] == "update"]
    assert [row["age"] for row in rows] == [0, 1]


@pytest.mark.slow
def test_too_many_skipped_updates_end_the_run_with_its_state_and_the_batch(trained: Path, tmp_path: Path) -> None:
    """At this learning rate the first step leaves nothing finite behind."""
    source = trained.parent / "run"
    changed = ["optimizer.lr=1e30", "optimizer.max_skipped=2", f"run.dir={tmp_path / 'b'}"]
    command = ["optimize", trained, "--stage", "0", "--from", source]
    ended = mugrpo(*command, *[word for change in changed for word in ("--set", change)], code=1)
    assert "2 updates in a row" in ended.stderr
    assert "Traceback" not in ended.stderr
    [batch] = (tmp_path / "b" / "poisoned").iterdir()
    assert batch.name == "stage00000-age00002.parquet"
    assert [path.name for path in complete(tmp_path / "b" / "checkpoints")] == ["stage00001-age00000"]
