"""The run directory: its layout, its lock, and the recipe of its run."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import remove_leftovers, write_text
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe
from mugrpo_megatron.run.record import (
    begun_weights,
    check_begun,
    check_hf,
    check_model,
    check_own,
    check_user_files,
    claim,
    hub_model,
    read_record,
    record_user_files,
)

WRITTEN = ("run.json", "data.json", "user_files.json", "recipe.toml", "summary.json", "hf")
"""Files that only the holder of the lock writes, so it may remove what a killed process left of them."""
MOMENTS_S = 20.0
"""How long `lock_soon` waits for a lock."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run's files; other tools rely on these names."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

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
        """Lock of processes that score the stage with auxiliary models."""
        return self.path / "stages" / f"{stage:05d}.lock"

    def stages(self) -> dict[int, Path]:
        """The directories of stages, by number; others next to them, such as a backup, are left out."""
        paths = sorted((self.path / "stages").glob("[0-9]" * 5))
        return {int(path.name): path for path in paths if path.is_dir()}

    def poisoned(self, stage: int, age: int) -> Path:
        """The batch of the update that ended the run, the last of too many skipped ones."""
        return self.path / "poisoned" / f"stage{stage:05d}-age{age:05d}.parquet"

    def trace(self, update: int, rank: int) -> Path:
        """A rank's profile of one update."""
        return self.path / "profile" / f"update{update:06d}-rank{rank:05d}.json.gz"

    @property
    def proximal_files(self) -> Path:
        """The directory of `proximal`; outside the stages' directories, since branches share those."""
        return self.path / "proximal"

    def proximal(self, stage: int, age: int) -> Path:
        """Logprobs of some updates' samples under the policy before update `age` of the stage."""
        return self.proximal_files / f"stage{stage:05d}-age{age:05d}.parquet"

    def probe(self, stage: int) -> Path:
        """How ratios of some of the stage's responses moved; outside the stage's directory, as `proximal_files`."""
        return self.path / "probe" / f"stage{stage:05d}"

    def samples(self, updates: int) -> Path:
        """Some responses of the evaluation after `updates` updates of the run."""
        return self.path / "evaluations" / f"update{updates:06d}.jsonl"

    def ref(self, stage: int) -> Path:
        """Logprobs of the stage's samples under the reference policy; outside the stage's directory, which branches
        share."""
        return self.path / "ref" / f"stage{stage:05d}.parquet"

    def auxiliary(self, stage: int, what: str) -> Path:
        """What an auxiliary model says of the stage's samples; outside the stage's directory, as `ref`."""
        return self.path / "auxiliary" / f"stage{stage:05d}-{what}.parquet"

    def auxiliary_files(self, stage: int) -> list[Path]:
        """The files of auxiliary models' columns of the stage, whole ones alone."""
        indices = sorted(self.path.glob(f"auxiliary/stage{stage:05d}-*.json"))
        return [path for index in indices for path in (index.with_suffix(".parquet"), index)]

    def behaviour(self, stage: int) -> Path:
        return self.stage(stage) / "behaviour.parquet"


@contextmanager
def open_directory(recipe: Recipe) -> Iterator[RunDirectory]:
    """Create or open `run.dir`, hold its lock while the block runs, and write what the run began with.

    Raises UserError when another process holds the lock, when the directory belongs to a run whose recipe computes
    something else, or holds files that no run has written, or cannot be written.
    """
    directory = RunDirectory(recipe.run.dir)
    check_directory(recipe)  # before a folder is made where none belongs
    try:
        for folder in (directory.path / "stages", directory.checkpoints, directory.logs):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir = {directory.path}: cannot be created ({error.strerror}); choose another") from None
    with locked(directory.path / ".lock"):
        for name in WRITTEN:
            remove_leftovers(directory.path, name)
        claim(directory.path, hub_model(recipe), begun_weights(recipe))
        check_directory(recipe)
        record_user_files(recipe)
        write_text(directory.recipe, dump_recipe(recipe))
        yield directory


def check_directory(recipe: Recipe) -> None:
    """Raise UserError when `run.dir` is not this run's to write into; changes nothing."""
    check_model(recipe.run.dir, recipe.model.path)
    check_own(recipe.run.dir)
    check_same_run(RunDirectory(recipe.run.dir), recipe)
    check_user_files(recipe)
    check_hf(recipe.run.dir)
    directory, record = RunDirectory(recipe.run.dir), read_record(recipe.run.dir)
    if record and not any(directory.checkpoints.glob("stage*")):
        check_begun(record, recipe, f"run.dir = {directory.path}, which has no checkpoint yet,")


class InUse(UserError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, shared: bool = False) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; it names the holder, and a holder that dies releases it.

    Any number of processes may hold it `shared`, but not while one holds it alone. Raises InUse when another process
    holds it, UserError when the file system has no locks or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another directory") from None
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 256).decode(errors="replace").strip()
            raise InUse(
                f"{path.parent} is in use by process {holder or 'unknown'}; wait for it, or choose another directory"
            ) from None
        except OSError as error:
            raise UserError(
                f"{path}: this file system has no file locks ({error.strerror}), which keep a second process out; "
                "mount it with them (Lustre: -o flock), or choose another directory"
            ) from None
        with suppress(OSError):  # a full disk: the lock is held all the same, only its holder's name is missing
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {platform.node()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def lock_soon(path: Path, shared: bool = False) -> Iterator[None]:
    """`locked`, where others hold the lock for moments only; InUse when one of them does for longer."""
    deadline = time.monotonic() + MOMENTS_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(path, shared))
                break
            except InUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield


def is_finished(recipe: Recipe) -> bool:
    """Whether `run.dir` holds this very run with all its updates taken.

    Raises UserError when the directory belongs to another run, or its summary is damaged.
    """
    directory = RunDirectory(recipe.run.dir)
    if not os.path.exists(directory.summary):  # unlike `Path.exists` also for a name that is too long
        return False
    check_own(recipe.run.dir)
    check_same_run(directory, recipe)
    try:
        updates = read_json(directory.summary).get("updates")
    except UserError as error:
        raise UserError(f"{error}; remove it, and the same command writes it again") from None
    if not isinstance(updates, int):
        raise UserError(
            f"{directory.summary} has no number of updates; remove it, and the same command writes it again"
        )
    return updates >= recipe.schedule.total_updates


def differing(old: Recipe, new: Recipe) -> list[str]:
    """The keys, as `section.key`, that differ between the recipes and change what is computed."""
    return [
        f"{name}.{key}"
        for name in Recipe.model_fields
        for key in sorted(getattr(old, name).model_fields_set | getattr(new, name).model_fields_set)
        if Recipe.changes_of(f"{name}.{key}") != "work"
        if not _same(getattr(getattr(old, name), key), getattr(getattr(new, name), key))
    ]


def _same(old: Any, new: Any) -> bool:
    """Whether two values of a key are the same; paths also when they lead to one place."""
    return bool(old == new) or (isinstance(old, Path) and isinstance(new, Path) and old.resolve() == new.resolve())


def check_same_run(directory: RunDirectory, new: Recipe) -> None:
    """Raise UserError when the directory belongs to a run whose recipe computes something else than `new`."""
    if not directory.recipe.exists():
        return
    # Where stages grow, their lengths depend on their number.
    longer = {"schedule.stages"} if new.schedule.growth == 1.0 else set()
    if wrong := sorted(set(differing(load_recipe(directory.recipe), new)) - longer):
        has_work = directory.stages() or any(directory.checkpoints.glob("stage*"))
        way = "resume with the recipe it holds" if has_work else "remove this one, in which nothing was generated"
        keys = ", ".join(wrong)
        raise UserError(
            f"{directory.path} belongs to a run with other values of {keys}; choose another run.dir, or {way}"
        )
