"""Every writer of a run directory, with a disk that is full and a process that is killed at each of its operations.

What was there is whole or what was to come is whole, nothing is read as something else, and the same call then works.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files import durable
from mugrpo_megatron.files.durable import durable_directory, full_disk_error, remove_leftovers, write_json
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import build_learner
from mugrpo_megatron.observe.log import open_log, read_rows
from mugrpo_megatron.recipe.sections import TrackSection
from mugrpo_megatron.run.branch import branch
from mugrpo_megatron.run.checkpoints import complete_checkpoints, newest_cursor
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.directory import RunDirectory, open_directory
from mugrpo_megatron.run.inputs import record_data
from mugrpo_megatron.run.record import read_record
from mugrpo_megatron.stages.columns import LogprobColumn
from mugrpo_megatron.stages.store import StageStore
from tests.hostile.faults import Disk, Fault, Killed, disk, failing
from tests.hostile.rundir import GROUPS, PROBLEMS, PROMPTS, UPDATES, fill, logprobs, make, recipe, save, stage_of
from tests.learner import tiny
from tests.ranks import run_ranks

PLAIN = TrackSection(tensorboard=False)
FAULTS: tuple[Fault, ...] = ("full", "killed")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("source") / "run").run.dir


def begin(path: Path) -> RunDirectory:
    """A run directory without stages, and its lock released."""
    with open_directory(recipe(path)) as directory:
        return directory


def opens(path: Path, source: Path) -> None:
    with open_directory(recipe(path)):
        record_data(path, PROBLEMS)


def check_opens(path: Path, before: Any, done: bool) -> Any:
    record = read_record(path) if path.exists() else None
    assert before is None or record == before, "its id does not change once it is written"
    assert record or not done
    return record


def generates(path: Path, source: Path) -> None:
    store = stage_of(RunDirectory(path), 0)
    if not store.sealed:
        fill(store, 0)
        store.seal(UPDATES, PROMPTS)


def check_generates(path: Path, before: Any, done: bool) -> Any:
    store = stage_of(RunDirectory(path), 0)
    present = store.verified_groups()
    assert before is None or present >= before, "a committed group stays"
    if store.sealed:
        groups = [sample.group for update in range(UPDATES) for sample in store.read_update(update)]
        assert groups == [group for group in range(GROUPS) for _ in range(2)]
    assert store.sealed or not done
    return present


def check_recomputes(path: Path, before: Any, done: bool) -> Any:
    directory = RunDirectory(path)
    store = stage_of(directory, 0)
    column = LogprobColumn(directory.behaviour(0), {"stage": store.content})
    if column.complete:
        for update in range(UPDATES):
            own = column.read(update)
            assert [len(one) for one in own] == [len(sample.response_ids) for sample in store.read_update(update)]
    else:
        assert not done
    return None


def saves(path: Path, source: Path) -> None:
    directory = RunDirectory(path)
    try:
        save(directory, Cursor(0, 1, 1))
    except OSError as error:
        raise full_disk_error(error, directory.checkpoints) or error from error


def check_saves(path: Path, before: Any, done: bool) -> Any:
    found = newest_cursor(RunDirectory(path).checkpoints)
    assert found in (Cursor(), Cursor(0, 1, 1))
    assert found == Cursor(0, 1, 1) or not (done or before == Cursor(0, 1, 1))
    return found


def exports(path: Path, source: Path) -> None:
    remove_leftovers(path, "hf")  # as `open_directory` does
    with durable_directory(path / "hf") as partial:
        for name in ("config.json", "model.safetensors"):
            write_json(partial / name, "new")


def check_exports(path: Path, before: Any, done: bool) -> Any:
    remove_leftovers(path, "hf")
    found = {file.name: file.read_text() for file in (path / "hf").iterdir()}
    assert found in (dict.fromkeys(OLD, '"old"\n'), dict.fromkeys(OLD, '"new"\n'))
    assert '"new"\n' in found.values() or not done
    return None


OLD = ("config.json", "model.safetensors")


def check_branches(path: Path, before: Any, done: bool) -> Any:
    stage = path / "stages" / "00001"
    if stage.exists():
        assert StageStore(stage).read_update(1)[0].group == PROMPTS
    record = read_record(path) if path.exists() else None
    if record and record.branch:
        assert newest_cursor(path / "checkpoints") == Cursor(1, 0, 2)
        assert stage_of(RunDirectory(path), 1).read_update(0)
    assert (record and record.branch) or not done
    return None


def logs(path: Path, source: Path) -> None:
    with open_log(path, PLAIN) as log:
        log.event("e", "t")


def check_logs(path: Path, before: Any, done: bool) -> Any:
    rows = len(read_rows(path / "metrics.jsonl"))
    assert before is None or rows >= before
    assert rows > (before or 0) or not done
    return rows


def generated(path: Path) -> None:
    begin(path)
    generates(path, path)


def computed(path: Path) -> None:
    generated(path)
    logprobs(RunDirectory(path), 0, part=3)


def exported(path: Path) -> None:
    (path / "hf").mkdir()
    for name in OLD:
        write_json(path / "hf" / name, "old")


WRITERS: dict[str, tuple[Callable[[Path], object], Callable[[Path, Path], None], Callable[[Path, Any, bool], Any]]] = {
    "open": (Path, opens, check_opens),  # nothing is there yet
    "generate": (begin, generates, check_generates),
    "recompute": (computed, lambda path, source: logprobs(RunDirectory(path), 0), check_recomputes),
    "save": (begin, saves, check_saves),
    "export": (exported, exports, check_exports),
    "branch": (Path, lambda path, source: branch(recipe(path), source, 1), check_branches),
    "log": (lambda path: logs(path, path), logs, check_logs),
}


CASES = [*((writer, True) for writer in WRITERS), ("export", False)]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("writer", "swaps"), CASES)
def test_each_operation_may_be_the_last(
    writer: str, swaps: bool, fault: Fault, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once with an atomic swap of two names, once on a file system without it, such as NFS.

    A disk stays full, so every second operation as the first that fails is enough there. A stage's groups are written
    alike, so every third reaches each kind of operation.
    """
    prepare, act, check = WRITERS[writer]
    if not swaps:
        monkeypatch.setattr(durable, "_exchange_atomically", lambda one, other: False)
    (tmp_path / "prepared").mkdir()
    prepare(tmp_path / "prepared")
    for last in count(step=(1 if fault == "killed" else 2) * (3 if writer == "generate" else 1)):
        path = tmp_path / "run"
        shutil.copytree(tmp_path / "prepared", path)
        before = check(path, None, False)
        disk = Disk(fault, last)
        try:
            with failing(disk):
                act(path, source)
        except Killed:
            pass
        except UserError as error:
            assert fault == "full"
            assert any(words in str(error) for words in ("no space left", "No space left"))
        else:
            assert not disk.failed or fault == "full"
        between = check(path, before, False)
        act(path, source)
        check(path, between, True)
        shutil.rmtree(path)
        if not disk.failed:
            break
    assert last > 1


PAGE = 4096
FIRST, SECOND = "stage00000-age00001", "stage00000-age00002"


def save_on_disks_of(pages: list[int], model: Path, folder: Path) -> list[tuple[str, list[str], str | None]]:
    """For each size: what the second of two saves says, which checkpoints are complete, and damage to the first."""
    learner = build_learner(tiny.recipe(model))
    checkpoint.create_empty_directory = lambda partial, needed: partial.mkdir()  # type: ignore[attr-defined]
    told = []
    for size in pages:
        with disk(folder, size * PAGE) as place:
            said = ""
            try:
                for name in (FIRST, SECOND):
                    checkpoint.begin_save(
                        learner, place / name, {"run": "run", "cursor": {"stage": 0, "age": 0, "updates": 0}}
                    )()
            except UserError as error:
                said = str(error)
            whole = [path.name for path in complete_checkpoints(place)]
            told.append((said, whole, checkpoint.find_damage(learner, place / FIRST) if whole else None))
    return told


@pytest.mark.process
def test_a_save_on_a_full_disk(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model", layers=1)
    pages = [*range(1, 40, 8), *range(40, 280, 16)]
    [told] = run_ranks(1, save_on_disks_of, pages, model, tmp_path / "disk")
    for said, whole, damage in told:
        assert ("no space left" in said) == (len(whole) < 2)
        assert "\n" not in said
        assert damage is None
    assert {len(whole) for _, whole, _ in told} == {0, 1, 2}, "it filled in either save, and in none"
