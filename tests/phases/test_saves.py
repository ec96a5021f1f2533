"""When a run saves, and that a resume from an earlier stage ends like the unbroken run."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.phases.saves import save_if_due
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.checkpoints import complete
from mugrpo_megatron.run.cursor import Cursor
from tests.tiny import FINISHED, mugrpo, write_run


def saves(stages: int, updates: int, engines: int = 1, **checkpoint: int) -> list[tuple[int, int]]:
    """(stage, age) at each save of a run."""
    recipe = Recipe.model_validate(
        {"schedule": {"stages": stages, "updates_per_stage": updates}, "checkpoint": checkpoint}
    )
    found: list[tuple[int, int]] = []
    saver = SimpleNamespace(overdue=False, save=lambda cursor: found.append((cursor.stage, cursor.age)))
    world = SimpleNamespace(any_rank=lambda *flags: list(flags), engines=engines)
    log, stop = SimpleNamespace(phase=lambda *_: nullcontext()), SimpleNamespace(asked=False)
    run: Any = SimpleNamespace(recipe=recipe, world=world, saver=saver, log=log, stop=stop, is_main=True)
    cursor = Cursor()
    while not cursor.finished(recipe.schedule):
        cursor = cursor.advanced(recipe.schedule, cursor.stage_updates(recipe.schedule))
        save_if_due(run, cursor)
    return found


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({}, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]),
        ({"every_stages": 2}, [(2, 0), (4, 0), (5, 0)]),
        ({"every_stages": 9}, [(5, 0)]),
        ({"every_stages": 3, "every_updates": 3}, [(0, 3), (1, 3), (2, 3), (3, 0), (3, 3), (4, 3), (5, 0)]),
    ],
    ids=str,
)
def test_saves_at_the_ends_of_every_nth_stage_and_of_the_last(
    checkpoint: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    assert saves(5, 4, **checkpoint) == expected


def test_a_stage_optimized_by_its_own_command_is_always_saved() -> None:
    assert saves(3, 2, engines=0, every_stages=9) == [(1, 0), (2, 0), (3, 0)]


@pytest.mark.process
def test_sealed_stages_after_the_checkpoint_are_optimized_again_to_the_same_weights(
    finished_run: Path, tmp_path: Path
) -> None:
    """The run resumes inside its first stage, although its second one is sealed and its updates are logged."""
    recipe = write_run(tmp_path, finished_run.parent / "model", checkpoint={"every_stages": 9, "every_updates": 0})
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "summary.json").unlink()
    shutil.rmtree(run / "hf")
    for path in complete(run / "checkpoints"):
        if path.name != "stage00000-age00018":
            shutil.rmtree(path)
    before = len(read_rows(run / "metrics.jsonl"))
    mugrpo("train", recipe)
    assert (run / "hf/model.safetensors").read_bytes() == (finished_run / "hf/model.safetensors").read_bytes()
    new = read_rows(run / "metrics.jsonl")[before:]
    assert [row["update"] for row in new if row["kind"] == "update"] == list(
        range(18, 2 * FINISHED["updates_per_stage"])
    )
    assert not any(row.get("phase") == "generate" for row in new)
    assert [path.name for path in complete(run / "checkpoints")] == ["stage00000-age00018", "stage00002-age00000"]
