"""Which stage is offered when, which weights sample it, and what a process that follows does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mugrpo_megatron.run.batch import Standing, begin, standing
from mugrpo_megatron.run.following import offered_stages
from mugrpo_megatron.run.prefetch import read_mark, stage_origin

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.recipe import Recipe, dump_recipe
from mugrpo_megatron.recipe.sections import ScheduleSection
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import MARK, Branch, Record, claim, mark, read_record
from mugrpo_megatron.samples import Problem
from mugrpo_megatron.stages.manifest import Manifest, Origin, manifest_name, write_manifest

FOUND = Problems([Problem("p", "1 + 1", "2", "p")], [], [])


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleSection:
    stages, updates, passes = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    return ScheduleSection(
        stages=stages,
        updates_per_stage=updates,
        passes=passes,
        growth=draw(st.sampled_from([1.0, 0.5, 2.0])),
        prefetch=draw(st.integers(0, updates * passes)),
    )


def visited(schedule: ScheduleSection) -> list[Cursor]:
    """Every cursor of a run, its end included."""
    cursors = [Cursor()]
    while not cursors[-1].finished(schedule):
        cursors.append(cursors[-1].advanced(schedule, cursors[-1].stage_updates(schedule)))
    return cursors


@given(schedules())
def test_every_stage_but_the_first_is_offered_once_as_early_as_asked(schedule: ScheduleSection) -> None:
    cursors = visited(schedule)
    starts = [cursor for cursor in cursors if cursor.age == 0]
    stages = [list(rows) for _, rows in groupby(cursors[:-1], key=lambda cursor: cursor.stage)]
    for own, (start, following) in zip(stages, pairwise(starts), strict=True):
        held = start.stage_updates(schedule)
        assert {cursor.next_stage(schedule, held) for cursor in own} == {following}
        offering = [cursor for cursor in own if cursor.offers(schedule, held)]
        begins = [cursor for cursor in own if cursor.begins_offer(schedule, held)]
        if not schedule.prefetch:
            assert not offering
            assert not begins
            continue
        assert len(begins) == 1
        assert following.updates - begins[0].updates == min(schedule.prefetch, len(own)), "the staleness of its start"
        if following.finished(schedule):
            assert not offering
        else:
            assert offering == own[begins[0].age :]
            assert {cursor.offers(schedule, held) for cursor in offering} == {following}


@given(schedules())
def test_prefetch_0_is_the_schedule_without_the_key(schedule: ScheduleSection) -> None:
    zero = schedule.model_copy(update={"prefetch": 0})
    absent = ScheduleSection.model_validate(schedule.model_dump(exclude={"prefetch"}))
    assert zero == absent
    assert visited(zero) == visited(absent) == visited(schedule), "prefetch moves no update"
    for cursor in visited(zero)[:-1]:
        held = cursor.stage_updates(zero)
        assert (cursor.offers(zero, held), cursor.begins_offer(zero, held)) == (None, False)


def test_prefetch_0_is_the_recipe_without_the_key(tmp_path: Path) -> None:
    """Byte by byte where a run keeps its recipe, and the run of one is continued with the other."""
    zero = recipe_of(tmp_path, prefetch=0)
    table = zero.model_dump(mode="json")
    del table["schedule"]["prefetch"]
    absent = Recipe.model_validate(table)
    assert dump_recipe(zero) == dump_recipe(absent)
    begun = begin(absent, FOUND)
    assert begin(zero, FOUND) == begun
    kept = RunDirectory(zero.run.dir).recipe
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if not line.startswith("prefetch = ")))
    assert begin(zero, FOUND) == begun, "a run that was begun before the key was there"


def recipe_of(tmp_path: Path, prefetch: int = 2, stages: int = 3) -> Recipe:
    weights = tmp_path / "model"
    weights.mkdir(exist_ok=True)
    (weights / "model.safetensors").write_bytes(b"weights")
    schedule = {"stages": stages, "updates_per_stage": 4, "prefetch": prefetch}
    return Recipe.model_validate(
        {"run": {"dir": str(tmp_path / "run")}, "model": {"path": str(weights)}, "schedule": schedule}
    )


def write_mark(directory: RunDirectory, record: Record, cursor: Cursor, samples: Cursor | None = None) -> None:
    directory.hf.mkdir(exist_ok=True)
    write_json(directory.hf / MARK, mark(record, asdict(cursor), asdict(samples) if samples else None))


def test_a_stage_is_of_the_weights_that_were_offered_for_it(tmp_path: Path) -> None:
    """By the mark until something of the stage is on disk, then by that; never of weights outside the window."""
    recipe = recipe_of(tmp_path)
    directory, record = RunDirectory(recipe.run.dir), begin(recipe, FOUND).record
    start = Cursor(1, 0, 4)

    def version(cursor: Cursor = start, prefetch: int = 2, of: Record = record) -> int:
        return stage_origin(directory, of, cursor, ScheduleSection(updates_per_stage=4, prefetch=prefetch)).updates

    assert read_mark(directory, record) is None
    assert version() == 4
    write_mark(directory, record, Cursor(0, 3, 3), start)
    assert standing(directory, recipe).origin == Origin(record.id, 1, 3)
    assert standing(directory, recipe).offered
    assert [version(), version(Cursor(1, 3, 7)), version(Cursor(2, 0, 8)), version(prefetch=0)] == [3, 3, 8, 4]
    stage = directory.stage(1)
    stage.mkdir()
    write_manifest(stage, Manifest([], origin=Origin(record.id, 1, 2)), manifest_name(2))
    assert [version(), version(prefetch=1), version(prefetch=0)] == [2, 3, 4]
    write_mark(directory, record, Cursor(1, 2, 6), Cursor(2, 0, 8))
    assert [version(), version(Cursor(2, 0, 8))] == [2, 6]
    branch = Record("b", Branch("elsewhere", 1, record.id))
    (directory.hf / MARK).unlink()
    directory.hf.rmdir()
    assert [version(prefetch=0, of=branch), version(Cursor(2, 0, 8), 0, of=branch)] == [2, 8]
    write_manifest(stage, Manifest([], origin=Origin("another", 1, 3)), manifest_name(2))
    assert version() == 4, "another run's says nothing"


def following(recipe: Recipe, *changes: Callable[[], object]) -> list[Standing]:
    """The stages that a process which follows is given, where `changes` happen between its looks."""
    left = list(changes)

    def wait() -> bool:
        if left:
            left.pop(0)()
            return True
        return False

    return [where for where, _ in offered_stages(recipe, FOUND, wait)]


def test_who_follows_gets_each_offered_stage_once_until_the_last(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    directory = RunDirectory(recipe.run.dir)
    first, last = Cursor(1, 0, 4), Cursor(2, 0, 8)

    def offer(cursor: Cursor, samples: Cursor | None = None) -> Callable[[], None]:
        return lambda: write_mark(directory, claim(recipe.run.dir), cursor, samples)

    assert following(recipe) == [], "there is no run yet, and it was asked to stop"
    found = following(
        recipe,
        lambda: begin(recipe, FOUND),
        lambda: None,
        offer(Cursor(0, 2, 2), first),
        lambda: None,
        offer(Cursor(1, 2, 6), last),
        lambda: pytest.fail("the last stage was offered"),
    )
    record = read_record(recipe.run.dir)
    assert record is not None
    assert found == [Standing(record, first, directory.hf, 2), Standing(record, last, directory.hf, 6)]
    assert following(recipe, lambda: pytest.fail("it is offered")) == found[1:], "as after a kill"
    offer(Cursor(3, 0, 12))()
    assert following(recipe, lambda: pytest.fail("the run is finished")) == []
    (directory.path / "recipe.toml").write_text(
        (directory.path / "recipe.toml").read_text().replace("stages = 3", "stages = 4")
    )
    assert following(recipe, offer(Cursor(2, 2, 10), Cursor(3, 0, 12)))[0].cursor.stage == 3, "the run was continued"


def test_who_follows_another_run_or_other_problems_is_told(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    begin(recipe, FOUND)
    with pytest.raises(UserError, match=r"other values of schedule.prefetch"):
        following(recipe_of(tmp_path, prefetch=1))
    with pytest.raises(UserError, match="other problems"):
        list(offered_stages(recipe, Problems([Problem("p", "1 + 2", "3", "p")], [], []), lambda: False))


def test_a_mark_that_comes_between_two_looks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system cannot swap two directories, hf/ has no name for a moment."""
    directory, record = RunDirectory(tmp_path), claim(tmp_path)
    exists = Path.exists

    def comes(path: Path, **options: bool) -> bool:
        if path == directory.hf and not exists(path):
            write_mark(directory, record, Cursor(1, 0, 4))
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", comes)
    found = read_mark(directory, record)
    assert found
    assert found.cursor == Cursor(1, 0, 4)
