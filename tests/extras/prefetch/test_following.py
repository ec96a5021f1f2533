"""Stages generated ahead: which, with which weights, and what the learner makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.prefetch.following import ahead, claimed, seal_ahead, stages_ahead
from mugrpo_megatron.extras.prefetch.shares import Position, Share, begin, close_stage, mark_share
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.sections import ScheduleSection
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.origin import hf_cursor, stage_origin
from mugrpo_megatron.run.record import MARK, Branch, Record, claim, mark
from mugrpo_megatron.samples import Problem, Sample
from mugrpo_megatron.stages.manifest import Manifest, Origin, write_manifest
from mugrpo_megatron.stages.store import StageStore

PROBLEMS = Problems([Problem("p", "1 + 1", "2", "p")], [], [])


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleSection:
    stages, updates, epochs = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    return ScheduleSection(
        stages=stages,
        updates_per_stage=updates,
        epochs=epochs,
        growth=draw(st.sampled_from([1.0, 0.5, 2.0])),
        max_sample_age=draw(st.integers(0, updates * epochs)),
    )


def visited(schedule: ScheduleSection) -> list[Cursor]:
    """Every cursor of a run, its end included."""
    cursors = [Cursor()]
    while not cursors[-1].finished(schedule):
        cursors.append(cursors[-1].advanced(schedule, cursors[-1].stage_updates(schedule)))
    return cursors


@given(schedules())
def test_hf_is_written_once_in_every_stage_but_the_last_as_early_as_it_may_sample_the_next(
    schedule: ScheduleSection,
) -> None:
    stages = [list(rows) for _, rows in groupby(visited(schedule)[:-1], key=lambda cursor: cursor.stage)]
    for number, cursors in enumerate(stages):
        first = [cursor for cursor in cursors if cursor.samples_next(schedule)]
        assert len(first) == (schedule.max_sample_age > 0 and number < len(stages) - 1)
        for cursor in first:
            following = cursor.next_stage(schedule, cursor.stage_updates(schedule))
            assert following == stages[number + 1][0]
            assert following.updates - cursor.updates == min(schedule.max_sample_age, len(cursors))


def recipe_of(tmp_path: Path, age: int = 2, stages: int = 3) -> Recipe:
    weights = tmp_path / "model"
    weights.mkdir(exist_ok=True)
    (weights / "model.safetensors").write_bytes(b"weights")
    return Recipe.model_validate(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"path": str(weights)},
            "schedule": {"stages": stages, "updates_per_stage": 4, "max_sample_age": age},
            "rollout": {"prompts_per_update": 1, "responses_per_prompt": 2},
        }
    )


def write_hf(recipe: Recipe, cursor: Cursor) -> None:
    """As the learner does at the cursor."""
    directory = RunDirectory(recipe.run.dir)
    directory.hf.mkdir(exist_ok=True)
    weights = directory.hf / "model.safetensors"
    weights.unlink(missing_ok=True)  # hf/ is replaced, never written into
    weights.write_bytes(b"after %d" % cursor.updates)
    (directory.hf / MARK).unlink(missing_ok=True)
    write_json(directory.hf / MARK, mark(claim(recipe.run.dir), asdict(cursor)))


def fill(stage: Path, origin: Origin, writer: int, groups: range) -> StageStore:
    store = StageStore(stage, writer, origin)
    ids, logprobs = np.arange(3, dtype=np.int32), -np.arange(3, dtype=np.float32)
    for group in groups:
        store.append([Sample(group, "p", ids, ids, logprobs, float(r), origin.updates, "stop") for r in range(2)])
    store.flush()
    return store


def sealed(recipe: Recipe, stage: int) -> None:
    """The run's stage as the learner generates it."""
    directory = RunDirectory(recipe.run.dir)
    fill(directory.stage(stage), Origin(claim(recipe.run.dir).id, stage, 4 * stage), 0, range(4)).seal(4, 1)


def test_a_sealed_stage_may_be_of_weights_of_the_stated_age_and_no_older(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    directory, record = RunDirectory(recipe.run.dir), begin(recipe, PROBLEMS).record
    start = Cursor(1, 0, 4)

    def version(cursor: Cursor = start, age: int = 2, of: Record = record) -> int:
        return stage_origin(directory, of, cursor, ScheduleSection(updates_per_stage=4, max_sample_age=age)).updates

    assert version() == 4
    stage = directory.stage(1)
    stage.mkdir()
    write_manifest(stage, Manifest([], origin=Origin(record.id, 1, 2)))
    assert version() == 4, "what is not sealed is generated with the weights at the stage's start"
    (stage / "manifest.json").unlink()
    stage.rmdir()
    fill(stage, Origin(record.id, 1, 2), 0, range(4)).seal(4, 1)
    assert [version(), version(Cursor(1, 3, 7)), version(age=1), version(age=0)] == [2, 2, 4, 4]
    assert version(Cursor(2, 0, 8)) == 8
    branch = Record("b", Branch("elsewhere", 1, record.id))
    assert [version(age=0, of=branch), version(Cursor(2, 0, 8), 0, of=branch)] == [2, 8]
    assert version(of=Record("another")) == 4, "another run's says nothing"


def claimed_ahead(recipe: Recipe) -> Position:
    """Stage 1 of a run that has sealed stage 0 and written hf/ in it."""
    begin(recipe, PROBLEMS)
    sealed(recipe, 0)
    write_hf(recipe, Cursor(0, 2, 2))
    (where,) = following(recipe)
    return claimed(RunDirectory(recipe.run.dir), recipe, where)


def following(recipe: Recipe, *changes: Callable[[], object]) -> list[Position]:
    """The stages that a process which follows is given, where `changes` happen between its looks."""
    remaining = list(changes)

    def wait() -> bool:
        if remaining:
            remaining.pop(0)()
            return True
        return False

    return [where for where, _ in stages_ahead(recipe, PROBLEMS, wait)]


def test_who_follows_gets_each_stage_ahead_once_until_the_last(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    directory = RunDirectory(recipe.run.dir)

    def hf(cursor: Cursor) -> Callable[[], None]:
        return lambda: write_hf(recipe, cursor)

    assert following(recipe) == [], "there is no run yet, and it was asked to stop"
    positions = following(
        recipe,
        lambda: begin(recipe, PROBLEMS),
        lambda: sealed(recipe, 0),  # the model's weights would be four updates old
        hf(Cursor(0, 1, 1)),  # three
        hf(Cursor(0, 2, 2)),
        hf(Cursor(1, 0, 4)),  # stage 1 is the learner's to generate: it has no stage to train on
        lambda: sealed(recipe, 1),
        hf(Cursor(1, 2, 6)),
        lambda: pytest.fail("the last stage was given"),
    )
    assert [(where.cursor, where.version) for where in positions] == [(Cursor(1, 0, 4), 2), (Cursor(2, 0, 8), 6)]
    assert [where.stage for where in positions] == [ahead(directory, 1) / "stage", ahead(directory, 2) / "stage"]
    sealed(recipe, 2)
    assert following(recipe, lambda: None) == [], "the learner has it"
    write_hf(recipe, Cursor(3, 0, 12))
    assert following(recipe, lambda: pytest.fail("the run is finished")) == []


def test_the_first_who_claims_a_stage_chooses_its_weights_and_the_last_seals_it(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    directory = RunDirectory(recipe.run.dir)
    first = claimed_ahead(recipe)
    write_hf(recipe, Cursor(1, 0, 4))
    second = claimed(directory, recipe, first)
    assert first == second
    assert (first.weights / "model.safetensors").read_bytes() == b"after 2", "hf/ has gone on"
    for number, one in enumerate((first, second)):
        mark_share(Share(number, 2), one, PROBLEMS)
        assert not seal_ahead(directory, recipe, one)
        with pytest.raises(UserError, match=r"lacks \d of 4 groups; shares that lack some: .*/2 \(2\)"):
            close_stage(recipe, one)
        fill(one.stage, one.origin, number + 1, range(number, 4, 2))
    assert seal_ahead(directory, recipe, first)
    assert seal_ahead(directory, recipe, second), "it is done"
    origin = stage_origin(directory, first.record, Cursor(1, 0, 4), recipe.schedule)
    stage = StageStore(directory.stage(1), 0, origin)
    assert stage.sealed
    assert [sample.weight_version for sample in stage.read_update(3)] == [2, 2]
    assert not list((directory.path / "ahead").iterdir())


def test_what_was_begun_ahead_gives_way_to_the_learners_own(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    directory, where = RunDirectory(recipe.run.dir), claimed_ahead(recipe)
    mark_share(Share(0, 1), where, PROBLEMS)
    fill(where.stage, where.origin, 1, range(4))
    sealed(recipe, 1)
    bits = (directory.stage(1) / "stage.parquet").read_bytes()
    assert seal_ahead(directory, recipe, where)
    assert (directory.stage(1) / "stage.parquet").read_bytes() == bits
    assert not list((directory.path / "ahead").iterdir())


def test_who_follows_another_run_or_other_problems_is_told(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    begin(recipe, PROBLEMS)
    with pytest.raises(UserError, match=r"other values of schedule.max_sample_age"):
        following(recipe_of(tmp_path, age=1))
    with pytest.raises(UserError, match="other problems"):
        list(stages_ahead(recipe, Problems([Problem("p", "1 + 2", "3", "p")], [], []), lambda: False))


def test_a_mark_that_comes_between_two_looks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system cannot swap two directories, hf/ has no name for a moment."""
    recipe = recipe_of(tmp_path)
    directory, record = RunDirectory(recipe.run.dir), begin(recipe, PROBLEMS).record
    exists = Path.exists

    def comes(path: Path, **options: bool) -> bool:
        if path == directory.hf and not exists(path):
            write_hf(recipe, Cursor(1, 0, 4))
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", comes)
    assert hf_cursor(directory, record) == Cursor(1, 0, 4)
