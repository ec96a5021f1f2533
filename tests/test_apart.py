"""Phases run apart and stages optimized again: the weights that `mugrpo train` leaves, or a clear refusal."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mugrpo_megatron.checkpoints import complete
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.observe.report import write_report
from tests.tiny import COIN, mugrpo, save_model, write_recipe

Run = Callable[..., subprocess.CompletedProcess[str]]


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
    assert "mugrpo optimize" in mugrpo("generate", recipe).stdout, "a sealed stage is not generated twice"
    refused = mugrpo("generate", recipe, "--stage", "1", code=2).stderr
    assert "stands at stage 0" in refused
    assert (folder / "run" / "hf").exists() is False
    mugrpo("optimize", recipe)
    assert (folder / "run" / "hf" / "model.safetensors").exists()
    refused = mugrpo("optimize", recipe, code=2).stderr
    assert "mugrpo generate" in refused
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
    assert "taken all of its 2 stages" in mugrpo("optimize", trained, code=2).stderr


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
    ("arguments", "words"),
    [
        (["--from", "{source}"], "needs --stage"),
        (["--stage", "7", "--from", "{source}"], "no sealed stage 7"),
        (["--stage", "0", "--from", "{source}/nowhere"], "no run directory"),
        (["--stage", "0", "--from", "{source}", "--set", "rollout.temperature=0.5"], "rollout.temperature"),
        (["--stage", "0", "--from", "{source}", "--set", "run.dir={source}"], "holds a run already"),
    ],
)
@pytest.mark.slow
def test_a_branch_that_cannot_be_is_refused(arguments: list[str], words: str, trained: Path, tmp_path: Path) -> None:
    source = trained.parent / "run"
    filled = [argument.format(source=source) for argument in arguments]
    refused = mugrpo("optimize", trained, "--set", f"run.dir={tmp_path / 'b'}", *filled, code=2)
    assert words in refused.stderr


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
