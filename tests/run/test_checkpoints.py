"""Saves go on behind the run's back; damaged checkpoints are named and passed over; a full disk tears nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import STATE, first_damage
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.update import update
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.recipe.sections import CheckpointSection
from mugrpo_megatron.run.checkpoints import complete_checkpoints, newest_cursor, open_saver, restore_newest
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.record import RunRecord
from tests.hostile.damage import flip
from tests.hostile.faults import disk
from tests.learner.tiny import advantages, recipe, samples, save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.process

SECTION = CheckpointSection(keep=2)
RUN = RunRecord("0123456789abcdef")
CURSORS = [Cursor(0, 1), Cursor(0, 2), Cursor(1, 0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def take_updates_and_save(model: Path, directory: Path, parallel: dict[str, int], asynchronous: bool) -> list[float]:
    """A save after each of three updates, none waited for; the loss of the two updates after the second one."""
    learner = build_learner(recipe(model, parallel=parallel))
    losses = []
    with open_saver(
        learner, directory, CheckpointSection(keep=2, asynchronous=asynchronous), RUN.id, MetricLog()
    ) as saver:
        for seed, cursor in enumerate(CURSORS):
            losses.append(update(learner, samples(seed=seed), advantages(24, seed))["loss"])
            saver.save(cursor)
        losses.append(update(learner, samples(seed=3), advantages(24, 3))["loss"])
    return losses[2:]


def resume(model: Path, directory: Path) -> tuple[Cursor, list[str], list[float]]:
    said: list[str] = []
    learner = build_learner(recipe(model))
    cursor = restore_newest(learner, directory, RUN, said.append)
    left = [update(learner, samples(seed=s), advantages(24, s))["loss"] for s in range(learner.updates_done, 4)]
    return cursor, said, left


def refusals(model: Path, cases: list[tuple[Path, RunRecord]]) -> list[str]:
    learner, told = build_learner(recipe(model)), []
    for directory, record in cases:
        with pytest.raises(UserError) as error:
            restore_newest(learner, directory, record, print)
        told.append(str(error.value))
    return told


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return directory, run_ranks(1, take_updates_and_save, model, directory, {}, True)[0]


@pytest.fixture
def copied(saved: tuple[Path, list[float]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "c"))


def test_saves_in_the_background_hold_the_state_of_their_moment(
    model: Path, saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    directory, losses = saved
    assert [path.name for path in complete_checkpoints(directory)] == ["stage00000-age00002", "stage00001-age00000"]
    assert sorted(path.name for path in directory.iterdir()) == [path.name for path in complete_checkpoints(directory)]
    [(cursor, said, left)] = run_ranks(1, resume, model, directory)
    assert (cursor, said, left) == (Cursor(1, 0), [], losses[1:])
    run_ranks(1, take_updates_and_save, model, tmp_path, {}, False)
    for one, other in zip(complete_checkpoints(directory), complete_checkpoints(tmp_path), strict=True):
        assert (one / "__0_0.distcp").read_bytes() == (other / "__0_0.distcp").read_bytes()


def test_saves_in_the_background_work_on_several_ranks(model: Path, tmp_path: Path) -> None:
    losses = run_ranks(4, take_updates_and_save, model, tmp_path, {"tensor": 2, "pipeline": 2}, True)[0]
    [(cursor, _, left)] = run_ranks(1, resume, model, tmp_path)
    assert cursor == Cursor(1, 0)
    assert left == pytest.approx(losses[1:], rel=1e-4)


def test_a_flipped_byte_of_any_file_is_found_and_the_checkpoint_before_it_resumes(
    model: Path, saved: tuple[Path, list[float]], copied: Path
) -> None:
    newest = complete_checkpoints(copied)[-1]
    for path in newest.iterdir():
        whole = path.read_bytes()
        flip(path)
        assert path.name in str(first_damage(newest, 0, 1))
        path.write_bytes(whole)
    assert first_damage(newest, 0, 1) is None
    flip(newest / "__0_0.distcp")
    [(cursor, [said], left)] = run_ranks(1, resume, model, copied)
    assert cursor == Cursor(0, 2)
    assert "__0_0.distcp" in said
    assert "resumes from stage00000-age00002" in said
    assert left == saved[1], "updates 2 and 3 as in the unbroken run"
    assert (copied / "stage00001-age00000.damaged").is_dir(), "set aside, not removed"


def test_a_missing_state_is_found_however_often_and_leftovers_of_a_killed_save_go(model: Path, copied: Path) -> None:
    """A checkpoint that was damaged at the same place before keeps its name."""
    newest, leftover = complete_checkpoints(copied)[-1], copied / ".stage00001-age00003.partial"
    leftover.mkdir()
    for name in (".damaged", ".damaged-2"):
        newest.with_name(f"{newest.name}{name}").mkdir()
    (newest / STATE).unlink()
    [(cursor, [said], _)] = run_ranks(1, resume, model, copied)
    assert cursor == Cursor(0, 2)
    assert "has no state.json" in said
    assert "kept as stage00001-age00000.damaged-3, and the run resumes from stage00000-age00002" in said
    assert (newest.with_name(f"{newest.name}.damaged-3") / "metadata.json").exists()
    assert not leftover.exists()


def test_starting_over_is_not_silent_and_another_run_s_checkpoint_is_refused(
    model: Path, saved: tuple[Path, list[float]], copied: Path
) -> None:
    for path in complete_checkpoints(copied):
        flip(path / "__0_0.distcp")
    before = sorted(copied.rglob("*"))
    [(damaged, foreign)] = run_ranks(1, refusals, model, [(copied, RUN), (saved[0], RunRecord("another run"))])
    assert "every checkpoint" in damaged
    assert sorted(copied.rglob("*")) == before
    assert f"is a checkpoint of run {RUN.id}, not of another run" in foreign


def fill_the_disk(model: Path, directory: Path) -> str:
    """Saves until there is no room; the check beforehand is fooled, as by another process that writes meanwhile."""
    learner = build_learner(recipe(model))
    checkpoint.create_empty_directory = lambda partial, needed: partial.mkdir()  # type: ignore[attr-defined]
    with pytest.raises(UserError) as error:
        save_fifty_times(learner, directory)
    return str(error.value)


def save_fifty_times(learner: Learner, directory: Path) -> None:
    with open_saver(learner, directory, CheckpointSection(keep=50), RUN.id, MetricLog()) as saver:
        for age in range(1, 51):
            saver.save(Cursor(0, age))


def test_a_full_disk_ends_cleanly_with_the_checkpoints_before_it(model: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 3 << 20) as place:
        [message] = run_ranks(1, fill_the_disk, model, place)
        assert "no space left" in message
        assert complete_checkpoints(place), "what was complete is kept"
        [(cursor, said, _)] = run_ranks(1, resume, model, place)
        assert said == []
        assert cursor == newest_cursor(place)
