"""When a run saves, what it prints at its end, and that a resume from an earlier stage ends like the unbroken run."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.observe.progress import Display
from mugrpo_megatron.phases import saves
from mugrpo_megatron.phases.saves import save_if_due
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.checkpoints import complete_checkpoints
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import PROVENANCE, RunRecord
from tests.tiny import FINISHED, mugrpo, write_run


@dataclass
class Saves:
    """(stage, age) of each."""

    learner: list[tuple[int, int]]
    hf: list[tuple[int, int]]

    def add_hf(self, like: Path, out: Path, notes: dict[str, Any]) -> None:
        cursor = notes[PROVENANCE]["cursor"]
        self.hf.append((cursor["stage"], cursor["age"]))


def saved(stages: int, updates: int, engines: int = 1, **checkpoint: int) -> Saves:
    """Where a run saves, and where it writes `hf/` besides."""
    schedule = {"stages": stages, "updates_per_stage": updates}
    recipe = Recipe.model_validate({"schedule": schedule, "checkpoint": checkpoint})
    found = Saves([], [])
    saver = SimpleNamespace(save=lambda cursor: found.learner.append((cursor.stage, cursor.age)), save_hf=found.add_hf)
    world = SimpleNamespace(any_rank=lambda flag: flag, engines=engines)
    stop = SimpleNamespace(requested=False)
    world.broadcast = lambda value: value
    run: Any = SimpleNamespace(recipe=recipe, world=world, saver=saver, stop=stop, is_main=False)
    run.phase = lambda *_: nullcontext()
    run.directory, run.record = RunDirectory(recipe.run.dir), RunRecord("r")
    cursor = Cursor()
    while not cursor.finished(recipe.schedule):
        cursor = cursor.advanced(recipe.schedule, cursor.updates_sampled(recipe.schedule))
        save_if_due(run, cursor)
    return found


def test_nothing_is_saved_once_the_lock_is_gone() -> None:
    def gone() -> None:
        raise UserError("the lock is gone")

    saver = SimpleNamespace(save=lambda cursor: pytest.fail("it saved"))
    world = SimpleNamespace(any_rank=lambda flag: flag, engines=1, broadcast=lambda value: value)
    stop, directory = SimpleNamespace(requested=True), SimpleNamespace(check_lock=gone)
    run: Any = SimpleNamespace(recipe=Recipe(), world=world, saver=saver, stop=stop, is_main=True, directory=directory)
    with pytest.raises(UserError, match="the lock is gone"):
        save_if_due(run, Cursor())


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
    found = saved(5, 4, **checkpoint)
    assert found.learner == expected
    assert found.hf == [(stage, age) for stage, age in expected[:-1] if age == 0], "the last is written when it is over"


def test_hf_is_written_inside_a_run_only_where_it_may_be() -> None:
    assert saved(3, 2) == Saves([(1, 0), (2, 0), (3, 0)], [(1, 0), (2, 0)]), "the run's end writes the last hf/"


def test_a_stage_optimized_by_its_own_command_is_always_saved() -> None:
    assert saved(3, 2, engines=0, every_stages=9).learner == [(1, 0), (2, 0), (3, 0)]


def test_a_sign_is_a_line_of_its_own_below_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "equal rewards everywhere, " * 5
    summary: dict[str, Any] = {"health_warnings": [{"name": "equal rewards", "text": text, "remedy": "read some"}]}
    monkeypatch.setattr(saves, "summarize", lambda directory: summary)
    monkeypatch.setattr(saves, "summary_table", lambda summary: Table("narrow"))
    console = Console(width=60, record=True)
    monkeypatch.setattr("mugrpo_megatron.observe.health.page_address", lambda page, heading: f"{page}#{heading}")
    saves.show(RunDirectory(tmp_path), Display(console, None))
    assert f"warning: {text}; read some (troubleshooting#equal rewards)\n" in console.export_text()


def test_a_runs_end_says_what_the_whole_command_took(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(saves, "write_results", lambda *_: shown.append("written"))
    monkeypatch.setattr(saves, "show", lambda *_: shown.append("table"))
    monkeypatch.setattr(saves, "process_seconds", lambda: 95.0)
    display: Any = SimpleNamespace(say=shown.append)
    for is_main in (False, True):
        run: Any = SimpleNamespace(is_main=is_main, directory=None, display=display)
        saves.finish(run, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    line = "this command has taken 1:35, with imports and checks, which the total leaves out"
    assert shown == ["written", "written", "table", line]


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
    for path in complete_checkpoints(run / "checkpoints"):
        if path.name != "stage00000-age00009":
            shutil.rmtree(path)
    before = len(read_rows(run / "metrics.jsonl"))
    for _ in range(2):  # a stage each
        mugrpo("optimize", recipe)
    assert (run / "hf/model.safetensors").read_bytes() == (finished_run / "hf/model.safetensors").read_bytes()
    new = read_rows(run / "metrics.jsonl")[before:]
    assert [row["update"] for row in new if row["kind"] == "update"] == list(
        range(9, 2 * FINISHED["updates_per_stage"])
    )
    assert not any(row.get("phase") == "generate" for row in new)
    assert [path.name for path in complete_checkpoints(run / "checkpoints")] == [
        "stage00000-age00009",
        "stage00001-age00000",
        "stage00002-age00000",
    ]
