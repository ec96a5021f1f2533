"""Run directories with parts missing, swapped, foreign or locked: refused in one sentence, or told and continued."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.observe.log import open_log, read_rows
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.sections import TrackSection
from mugrpo_megatron.report.page import write_report
from mugrpo_megatron.run.checkpoints import check_checkpoint_identity
from mugrpo_megatron.run.directory import is_finished, open_directory
from mugrpo_megatron.run.inputs import check_data, record_data
from mugrpo_megatron.run.record import read_record
from mugrpo_megatron.samples import Problem
from tests.hostile.rundir import PROBLEMS, content, make, recipe, resume
from tests.refusals import refuses


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, str]:
    """A run directory, to be copied, and what a resumed run reads of it."""
    made = make(tmp_path_factory.mktemp("runs") / "run")
    return made, resume(made)[0]


def remove(*names: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        for name in names:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return act


def swap(one: str, other: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        (run / one).rename(run / "aside")
        (run / other).rename(run / one)
        (run / "aside").rename(run / other)

    return act


def copy(source: str, target: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        shutil.rmtree(run / target, ignore_errors=True)
        (run / target).unlink(missing_ok=True)
        (shutil.copytree if (run / source).is_dir() else shutil.copyfile)(run / source, run / target)

    return act


def replace_by(kind: str, name: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        remove(name)(run)
        if kind == "file":
            (run / name).write_text("mine")
        elif kind == "directory":
            (run / name).mkdir()
            (run / name / "mine").write_text("mine")
        else:
            (run / name).symlink_to(run.parent / "elsewhere" if kind == "dangling" else run.parent)

    return act


def both(*acts: Callable[[Path], None]) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        for one in acts:
            one(run)

    return act


STATE = "checkpoints/stage00001-age{:05d}/state.json"
REFUSED = {
    "stages swapped": (swap("stages/00000", "stages/00001"), r"stages/00001 holds stage 0 of run"),
    "an earlier stage in place of the current one": (copy("stages/00000", "stages/00001"), "holds stage 0"),
    "sealed files swapped": (
        swap("stages/00000/stage.parquet", "stages/00001/stage.parquet"),
        r"stage\.parquet: damaged",
    ),
    "logprobs of another stage": (
        both(*(copy(f"stages/00000/behaviour.{end}", f"stages/00001/behaviour.{end}") for end in ("parquet", "json"))),
        "for other responses",
    ),
    "logprobs without checksums": (remove("stages/00001/behaviour.json"), r"behaviour\.json: missing or damaged"),
    "logprobs gone": (remove("stages/00001/behaviour.parquet"), r"behaviour\.parquet: missing"),
    "a manifest gone": (remove("stages/00001/manifest.json"), r"manifest\.json is missing"),
    "a sealed file gone": (remove("stages/00001/stage.parquet"), r"stage\.parquet: missing"),
    "all states gone": (remove(STATE.format(0), STATE.format(1)), "every checkpoint in .* is damaged"),
    "the record gone": (remove("run.json"), r"has no run\.json"),
    "all but the stages gone": (
        remove("run.json", "recipe.toml", "metrics.jsonl", "hf", "checkpoints", "summary.json"),
        r"stages exists, but",
    ),
    "hf without a mark": (remove("hf/mugrpo.json"), "was not written by this run"),
    "hf is a file": (replace_by("file", "hf"), "not a directory"),
    "hf is another directory": (replace_by("directory", "hf"), "was not written by this run"),
    "hf is a link": (replace_by("link", "hf"), "a symbolic link"),
    "hf is a broken link": (replace_by("dangling", "hf"), "a symbolic link"),
    "stages is a file": (replace_by("file", "stages"), "cannot be created"),
    "checkpoints is a file": (replace_by("file", "checkpoints"), "cannot be created"),
    "the log is a directory": (replace_by("directory", "metrics.jsonl"), "cannot be read"),
    "the lock is a directory": (replace_by("directory", ".lock"), "cannot be written"),
    "the recipe is a directory": (replace_by("directory", "recipe.toml"), "recipe.toml"),
    "the record is a directory": (replace_by("directory", "run.json"), r"run\.json: damaged"),
    "the data's record is a directory": (replace_by("directory", "data.json"), r"data\.json: damaged"),
    "the summary is a directory": (replace_by("directory", "summary.json"), "summary.json"),
    "a manifest is a directory": (replace_by("directory", "stages/00001/manifest.json"), "damaged"),
}
TOLD = {
    "the newest state gone": (remove(STATE.format(1)), "not a complete checkpoint"),
    "a data file gone": (remove("checkpoints/stage00001-age00001/__0_0.distcp"), "is missing"),
    "data files swapped": (
        both(*(copy("run.json", f"checkpoints/stage00001-age{age:05d}/__0_0.distcp") for age in (0, 1))),
        "damaged",
    ),
    "a shard gone": (remove("stages/00002/shard-00000.parquet"), "generated again"),
}
ACCEPTED = {
    "a backup of a stage": copy("stages/00001", "stages/00001.bak"),
    "another directory among the stages": copy("stages/00001", "stages/old"),
    "a backup of a checkpoint": copy("checkpoints/stage00001-age00001", "checkpoints/stage00001-age00001.bak"),
    "a file among the stages": copy("run.json", "stages/00007"),
    "a file among the checkpoints": copy("run.json", "checkpoints/stage00009-age00000"),
    "notes in the run's directory": copy("run.json", "notes.json"),
    "no lock": remove(".lock"),
    "no summary": remove("summary.json"),
    "no log": remove("metrics.jsonl"),
    "no fingerprint of the data": remove("data.json"),
    "no hf": remove("hf"),
    "no recipe": remove("recipe.toml"),
    "leftovers": copy("run.json", ".summary.json.0123abcd.partial"),
}


@pytest.fixture
def changed(whole: tuple[Recipe, str], tmp_path: Path) -> Recipe:
    """A copy of the run directory at another place, which a user may well make."""
    shutil.copytree(whole[0].run.dir, tmp_path / "run")
    return recipe(tmp_path / "run")


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_runs_own_is_refused_and_stays(case: str, changed: Recipe) -> None:
    act, words = REFUSED[case]
    act(changed.run.dir)
    before = content(changed.run.dir)
    refuses(words, resume, changed)
    assert content(changed.run.dir) == before


@pytest.mark.parametrize("case", TOLD)
def test_damage_with_a_way_on_is_told(case: str, changed: Recipe) -> None:
    act, words = TOLD[case]
    act(changed.run.dir)
    before = content(changed.run.dir)
    _, found = resume(changed)
    assert words in " ".join(found)
    assert content(changed.run.dir) == before


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_lies_next_to_the_run_changes_nothing(case: str, changed: Recipe, whole: tuple[Recipe, str]) -> None:
    ACCEPTED[case](changed.run.dir)
    assert resume(changed) == (whole[1], [])


def test_files_of_another_run_are_refused(changed: Recipe, tmp_path: Path) -> None:
    """A stage, a checkpoint and an hf/ of a run with the same recipe and the same content but another id."""
    other = make(tmp_path / "other").run.dir
    before = content(changed.run.dir)
    for name, words in (
        ("stages/00001", "holds stage 1 of run"),
        ("hf", "was not written by this run"),
        ("stages/00002", "holds stage 2 of run"),
    ):
        (changed.run.dir / name).rename(tmp_path / "own")
        shutil.copytree(other / name, changed.run.dir / name)
        refuses(words, resume, changed)
        shutil.rmtree(changed.run.dir / name)
        (tmp_path / "own").rename(changed.run.dir / name)
    assert content(changed.run.dir) == before
    record = read_record(changed.run.dir)
    assert record
    place = "checkpoints/stage00001-age00001"
    check_checkpoint_identity(changed.run.dir / place, record)
    refuses("is a checkpoint of run", check_checkpoint_identity, other / place, record)
    renamed = (changed.run.dir / place).rename(changed.run.dir / "checkpoints" / "stage00002-age00000")
    refuses("holds the checkpoint stage00001-age00001", check_checkpoint_identity, renamed, record)


@pytest.mark.parametrize("name", ["hf", "stages", "checkpoints", "proximal", "metrics.jsonl", "recipe.toml"])
def test_a_directory_with_somebodys_files_is_left_alone(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / name
    if "." in name:
        path.parent.mkdir()
        path.write_text("mine")
    else:
        path.mkdir(parents=True)
        (path / "precious").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(UserError, match=rf"{name} exists, but"), open_directory(recipe(tmp_path / "run")):
        pass
    assert content(tmp_path) == before
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == [name], "nothing is made either"


@pytest.mark.parametrize("model", ["run/hf", "run/hf/base", "link", "run/../run/hf"])
def test_a_run_never_replaces_the_model_it_starts_from(model: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run" / "hf")
    made = recipe(tmp_path / "run", f"model.path={tmp_path / model}")
    with pytest.raises(UserError, match=r"model\.path = .* is where this run would write"), open_directory(made):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["", ".", "/", "~", "file", "file/run", "loop", "loop/run", "broken", "x" * 300])
def test_a_run_needs_a_directory_of_its_own(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    made = recipe(Path("runs/x"))
    made = made.model_copy(update={"run": made.run.model_copy(update={"dir": Path(place).expanduser()})})
    with pytest.raises(UserError, match=r"run\.dir = "), open_directory(made):
        pass
    assert not is_finished(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "file", "loop"]


CHANGES = [
    Problems([Problem("f:1", "1+1=", "3", "f")], PROBLEMS.held_out, []),
    Problems([Problem("f:1", "1 + 1=", "2", "f")], PROBLEMS.held_out, []),
    Problems([*PROBLEMS.train, Problem("f:2", "2+2=", "4", "f")], PROBLEMS.held_out, []),
    Problems([], PROBLEMS.held_out, []),
    Problems(PROBLEMS.train, [*PROBLEMS.held_out, Problem("h:1", "1", "1", "h")], []),
]


@pytest.mark.parametrize("now", CHANGES)
def test_data_that_changed_are_refused_until_accepted(now: Problems, changed: Recipe) -> None:
    refuses(r"began with other problems of [fh] .*or remove .*data\.json", check_data, changed.run.dir, now)
    check_data(changed.run.dir, PROBLEMS)
    (changed.run.dir / "data.json").unlink()
    record_data(changed.run.dir, now)
    check_data(changed.run.dir, now)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(number: int, changed: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    refuses("no file locks", resume, changed)


def test_a_read_only_place_is_told(changed: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(changed.run.dir)
    opened = os.open

    def read_only(path: object, flags: int, *rest: int, **more: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opened(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", read_only)
    refuses(r"\.lock cannot be written", resume, changed)
    monkeypatch.undo()
    assert content(changed.run.dir) == before


def test_a_second_process_is_refused_and_the_report_is_not(changed: Recipe) -> None:
    """The lock is the process's and the descriptor's: a second open of this process stands for another one."""
    with open_directory(changed) as directory, open_log(directory.path, TrackSection(tensorboard=False)) as log:
        refuses(f"in use by process {os.getpid()} on ", resume, changed)
        (directory.path / "metrics.jsonl").open("a").write('{"kind": "eve')  # it is in the middle of a row
        assert write_report(directory.path).exists()
        log.event("e", "t")
    assert (changed.run.dir / "report.html").stat().st_size > 10_000


def test_reports_while_a_run_goes_on_and_ends(changed: Recipe) -> None:
    """Rows, summary and report are written by the run while another process reads them and writes the same report."""
    run, ended = changed.run.dir, Event()

    def train() -> None:
        with open_directory(changed) as directory, open_log(run, TrackSection(tensorboard=False)) as log:
            for update in range(3, 60):
                log.update(1, update, update, {"loss": 0.5, "tokens": 9.0})
            write_json(directory.summary, {"updates": 60})
            for _ in range(3):
                write_report(run)
        ended.set()

    thread = Thread(target=train)
    thread.start()
    written = 0
    while not ended.is_set() and thread.is_alive():
        write_report(run)
        written += 1
    thread.join()
    assert ended.is_set()
    assert written
    assert len(read_rows(run / "metrics.jsonl")) > 60
    assert not [path.name for path in run.iterdir() if path.name.endswith(".partial")]
