"""The run directory: its paths, its lock, the run that it belongs to, and where its stages and hf/ come from."""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import CURSOR
from mugrpo_megatron.files.durable import open_nofollow, refuse_linked_folders, remove_leftovers, write_text
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe
from mugrpo_megatron.recipe.load import UNSET
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.initial_model import check_initial_weights, hub_model, weights_fingerprint
from mugrpo_megatron.run.inputs import check_user_files, record_user_files
from mugrpo_megatron.run.record import PROVENANCE, RunRecord, check_hf, check_model_path, check_run_dir, claim
from mugrpo_megatron.stages.manifest import Origin, read_manifest

REPLACED_FILES = ("run.json", "data.json", "user_files.json", "recipe.toml", "summary.json", "hf")
"""Files that only the holder of the directory's lock writes, so that it may remove what a killed process left of them.
"""
FOLDERS = (
    *("stages", "checkpoints", "logs", "proximal", "probe", "evaluations", "ref", "auxiliary"),
    *("poisoned", "profile", "tensorboard", "wandb"),
)
"""Folders that a run writes to."""
LOCK_WAIT_S = 60.0
"""The longest wait for a lock that other processes hold for a moment only."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run's files; other tools rely on these names."""

    path: Path
    check_lock: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    """Function that raises UserError, in the process that holds the lock, if the lock file was removed or replaced."""

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    def check_exists(self, option: str = "") -> None:
        """Raise UserError if this is no run directory; `option`, such as "--from ", begins the message."""
        if not self.recipe.exists():
            raise UserError(
                f"{option}{self.path}: not a run directory (it has no {self.recipe.name}); name the run.dir of a run"
            )

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def stage(self, stage: int) -> Path:
        return self.path / "stages" / f"{stage:05d}"

    def stage_lock(self, stage: int) -> Path:
        """The lock file of the processes that score the stage with auxiliary models."""
        return self.path / "stages" / f"{stage:05d}.lock"

    def stages(self) -> dict[int, Path]:
        """The directories of the stages, by number; those with other names, such as backups, are left out."""
        paths = sorted((self.path / "stages").glob("[0-9]" * 5))
        return {int(path.name): path for path in paths if path.is_dir()}

    def poisoned(self, stage: int, age: int) -> Path:
        """The file with the batch of the last skipped update; a run that ends because it skipped too many writes it."""
        return self.path / "poisoned" / f"stage{stage:05d}-age{age:05d}.parquet"

    def trace(self, update: int, rank: int) -> Path:
        """The file with a rank's profile of one update."""
        return self.path / "profile" / f"update{update:06d}-rank{rank:05d}.json.gz"

    @property
    def proximal_files(self) -> Path:
        """The directory of the files that `proximal` names.

        It is outside the stages' directories, because a branch shares their files with its source run by links.
        """
        return self.path / "proximal"

    def proximal(self, stage: int, age: int) -> Path:
        """The file with the log-probabilities of the proximal policy that was refreshed at this age, for the samples of
        the updates until its next refresh.
        """
        return self.proximal_files / f"stage{stage:05d}-age{age:05d}.parquet"

    def probe(self, stage: int) -> Path:
        """The directory of the stage's probe. It is outside the stage's directory, because branches share the files of
        that directory by links."""
        return self.path / "probe" / f"stage{stage:05d}"

    def samples(self, updates: int) -> Path:
        """The file with example responses of the evaluation after `updates` updates of the run."""
        return self.path / "evaluations" / f"update{updates:06d}.jsonl"

    def ref(self, stage: int) -> Path:
        """The file with the log-probabilities of the stage's samples under the reference policy.

        It is outside the stage's directory, because branches share that directory's files by links.
        """
        return self.path / "ref" / f"stage{stage:05d}.parquet"

    def auxiliary(self, stage: int, name: str) -> Path:
        """The file with what an auxiliary model computes for each response; `name` is `teacher-NAME` or `reward-NAME`.

        It is outside the stage's directory, because branches share that directory's files by links.
        """
        return self.path / "auxiliary" / f"stage{stage:05d}-{name}.parquet"

    def auxiliary_files(self, stage: int) -> list[Path]:
        """The files of the stage's complete auxiliary columns: for each column its values and its index."""
        indices = sorted(self.path.glob(f"auxiliary/stage{stage:05d}-*.json"))
        return [path for index in indices for path in (index.with_suffix(".parquet"), index)]

    def behaviour(self, stage: int) -> Path:
        return self.stage(stage) / "behaviour.parquet"


@contextmanager
def open_directory(recipe: Recipe) -> Iterator[RunDirectory]:
    """Create or open `run.dir`, and hold the directory's lock in the block.

    Before the block, the run's record, its recipe and the checksums of the user's files are written.

    Raises UserError when this run must not write into the directory (`check_directory`), when another process holds the
    lock, and when the directory cannot be written.
    """
    directory = RunDirectory(recipe.run.dir)
    check_directory(recipe)  # checked before folders are made, since the directory may be no run's
    try:
        for folder in (directory.path / "stages", directory.checkpoints, directory.logs):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run.dir = {directory.path}: it or a folder in it cannot be created ({error.strerror}); choose another"
        ) from None
    with file_lock(directory.path / ".lock") as check_lock:
        for name in REPLACED_FILES:
            remove_leftovers(directory.path, name)
        claim(directory.path, hub_model(recipe.model), weights_fingerprint(recipe.model))
        check_directory(recipe)  # again: another process may have started a run before this one had the lock
        record_user_files(recipe)
        write_text(directory.recipe, dump_recipe(recipe))
        yield replace(directory, check_lock=check_lock)


def check_directory(recipe: Recipe) -> None:
    """Raise UserError when this run must not write into `run.dir`; changes nothing.

    It must not if, for example, the directory belongs to a run whose recipe computes something else, or holds a run's
    files without the run's record.
    """
    directory = RunDirectory(recipe.run.dir)
    check_model_path(recipe.model.path, directory.hf)
    record = check_run_dir(directory.path)
    refuse_linked_folders(directory.path, FOLDERS)
    check_same_run(directory, recipe)
    check_user_files(recipe)
    check_hf(directory.hf, record)
    # A run that has no checkpoint yet starts from model.path again, which must still have the weights with which the
    # run began. A run with a checkpoint continues from that.
    if record and not any(directory.checkpoints.glob("stage*")):
        source = f"run.dir = {directory.path}, which has no checkpoint yet,"
        check_initial_weights(record, recipe.model, source)


class InUse(UserError):
    """Raised when another process holds a lock file."""


@contextmanager
def file_lock(path: Path, shared: bool = False, wait: bool = False) -> Iterator[Callable[[], None]]:
    """Hold the lock file `path` in the block. The file names the holder, and a holder that dies releases the lock.

    Yields a function that raises UserError if the file was removed or replaced since, because another process may then
    hold a lock of the same name.

    Either one process holds the lock alone, or any number hold it `shared`. Raises InUse when this process cannot have
    it beside the others, with `wait` only after LOCK_WAIT_S; UserError when the file system has no locks or the file
    cannot be written.
    """
    try:
        file = open_nofollow(path, "a+b", buffering=0)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another directory") from None
    deadline = time.monotonic() + (LOCK_WAIT_S if wait else 0.0)
    with file:
        descriptor = file.fileno()
        while not _try_lock(path, descriptor, shared):
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
                held = path.parent if path.name == ".lock" else path
                what = "directory" if path.name == ".lock" else "file"
                raise InUse(f"{held} is in use by process {holder or 'unknown'}; wait for it, or choose another {what}")
            time.sleep(0.1)
        with suppress(OSError):  # on a full disk the lock is held all the same, only the file lacks the holder's name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {platform.node()}".encode(), 0)
        yield lambda: _check_held(path, descriptor)


def _check_held(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        if os.path.samestat(path.stat(), os.fstat(descriptor)):
            return
    raise UserError(
        f"{path} was removed or replaced, so another process may write to {path.parent} too; end that process, and the "
        "same command then continues from the newest checkpoint"
    )


def _try_lock(path: Path, descriptor: int, shared: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            f"{path}: this file system has no file locks ({error.strerror}), which keep a second process out; "
            "mount it with them (Lustre: -o flock), or choose another directory"
        ) from None
    return True


def is_finished(recipe: Recipe) -> bool:
    """Whether `run.dir` holds the run of this recipe with a summary of all its updates, so that nothing is left to do.

    Raises UserError when the directory belongs to another run, or its summary is damaged.
    """
    directory = RunDirectory(recipe.run.dir)
    if not os.path.exists(directory.summary):  # `Path.exists` would raise for a name that is too long
        return False
    check_run_dir(recipe.run.dir)
    check_same_run(directory, recipe)
    remedy = "remove it, and the same command writes it again"
    updates = read_json(directory.summary, remedy).get("updates")
    if not isinstance(updates, int):
        raise UserError(f"{directory.summary} has no number of updates; {remedy}")
    return updates >= recipe.schedule.total_updates


def changed_keys(old: Recipe, new: Recipe) -> list[str]:
    """The keys, as `section.key`, in which the recipes differ and that change what a run computes."""
    return [
        f"{name}.{key}"
        for name in Recipe.model_fields
        for key in sorted(getattr(old, name).model_fields_set | getattr(new, name).model_fields_set)
        if Recipe.changes_of(f"{name}.{key}") != "work"
        if not _same(getattr(getattr(old, name), key), getattr(getattr(new, name), key))
    ]


def _same(old: Any, new: Any) -> bool:
    """Whether two values of a key are equal, or are paths of the same file."""
    return bool(old == new) or (isinstance(old, Path) and isinstance(new, Path) and old.resolve() == new.resolve())


def check_same_run(directory: RunDirectory, new: Recipe) -> None:
    """Raise UserError when the directory belongs to a run whose recipe computes something else than `new`."""
    if not directory.recipe.exists():
        return
    # More stages make the same run longer, except with `growth`, where the number of stages changes their lengths.
    longer = {"schedule.stages"} if new.schedule.growth == 1.0 else set()
    if changed := sorted(set(changed_keys(load_recipe(directory.recipe), new)) - longer):
        has_work = directory.stages() or any(directory.checkpoints.glob("stage*"))
        remedy = "resume with the recipe it holds" if has_work else "remove this one, in which nothing was generated"
        raise UserError(
            f"{directory.path} belongs to a run with other values of {', '.join(changed)}; choose another run.dir, or "
            f"{remedy}{_as_a_branch(directory, new, changed)}"
        )


def _as_a_branch(directory: RunDirectory, new: Recipe, changed: Sequence[str]) -> str:
    """The end of an error: the command that trains on the newest sealed stage again with the new values, as a branch.

    Empty if there is no sealed stage, or if a branch cannot change these keys.
    """
    sealed = [number for number, path in directory.stages().items() if read_manifest(path).sealed]
    if not sealed or not all(Recipe.changes_of(key) for key in changed):
        return ""
    table = new.model_dump(mode="json", exclude_none=True)
    values: dict[str, Any] = {key: _at(table, key) for key in changed}
    settings = [f"{key}={UNSET if value is None else value}" for key, value in values.items()]
    words = ["mugrpo", "optimize", str(directory.recipe), "--from", str(directory.path), "--stage", str(max(sealed))]
    for setting in (f"run.dir={directory.path}-branch", *settings):
        words += ["--set", setting]
    return f"; to take the responses of stage {max(sealed)} again with the new values: {shlex.join(words)}"


def _at(table: Any, key: str) -> Any:
    return reduce(lambda inner, name: inner.get(name) if isinstance(inner, dict) else None, key.split("."), table)


def stage_origin(directory: RunDirectory, record: RunRecord, cursor: Cursor) -> Origin:
    """The origin that the cursor's stage must have: the run that generates it, and the weights that sample it.

    They are this run and the weights at the stage's start. For the first stage of a branch they are the other run that
    generated it, and the weights that it was sampled with.
    """
    start, run = cursor.updates - cursor.age, record.run_of_stage(cursor.stage)
    # A branch may begin with later weights than those that sampled its first stage, which stays as it was sampled.
    if record.branch is not None and record.branch.stage == cursor.stage:
        manifest = read_manifest(directory.stage(cursor.stage))
        origin = manifest.origin if manifest.sealed else None
        if origin and (origin.run, origin.stage) == (run, cursor.stage) and origin.updates <= start:
            return origin
    return Origin(run, cursor.stage, start)


def hf_cursor(directory: RunDirectory, record: RunRecord) -> Cursor | None:
    """The cursor of the weights in `hf/`; None without `hf/`. UserError when hf/ does not name a cursor of this run."""
    path = directory.hf / PROVENANCE
    try:
        content = read_json(path)
    except UserError:
        # There may be no hf/ yet, or it may be replaced at this moment, on a file system that cannot swap two names.
        if not directory.hf.exists():
            return None
        content = read_json(path)  # a replacement of hf/ may have ended since the first attempt to read it
    try:
        if content.get("run") == record.id:
            return Cursor(**CURSOR.validate_python(content.get("cursor")))
    except ValidationError:
        pass
    raise UserError(
        f"{path} does not say at which update of this run its weights are; write hf/ with `mugrpo optimize`"
    )
