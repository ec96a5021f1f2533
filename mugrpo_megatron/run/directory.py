"""The run directory: its layout, its lock, and the recipe of its run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import remove_leftovers, write_text
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe

FREE_TO_CHANGE = {"parallel", "learner", "engine", "eval", "checkpoint", "track"}
"""Sections that a resumed run may change: how the work is done, not what is computed."""
WRITTEN = ("recipe.toml", "branch.json", "summary.json", "hf")
"""Files that only the holder of the lock writes, so it may remove what a killed process left of them."""


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

    def poisoned(self, stage: int, age: int) -> Path:
        """The batch of the update that ended the run, the last of too many skipped ones."""
        return self.path / "poisoned" / f"stage{stage:05d}-age{age:05d}.parquet"

    @property
    def references(self) -> Path:
        """The directory of `reference`; outside the stages' directories, since branches share those."""
        return self.path / "reference"

    def reference(self, stage: int, age: int) -> Path:
        """Logprobs of some updates' samples under the policy before update `age` of the stage."""
        return self.references / f"stage{stage:05d}-age{age:05d}.parquet"

    def behaviour(self, stage: int) -> Path:
        return self.stage(stage) / "behaviour.parquet"


@contextmanager
def open_directory(recipe: Recipe) -> Iterator[RunDirectory]:
    """Create or open `run.dir`, hold its lock while the block runs, and write the resolved recipe.

    Raises UserError when another process holds the lock, or when the directory belongs to a run whose recipe computes
    something else.
    """
    directory = RunDirectory(recipe.run.dir)
    try:
        for folder in (directory.path / "stages", directory.checkpoints, directory.logs):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir = {directory.path}: cannot be created ({error.strerror}); choose another") from None
    with locked(directory.path / ".lock"):
        check_same_run(directory, recipe)
        for name in WRITTEN:
            remove_leftovers(directory.path, name)
        write_text(directory.recipe, dump_recipe(recipe))
        yield directory


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; UserError when another process holds it."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{path.parent} is in use by process {file.read().strip() or 'unknown'}; "
                "wait for it, or choose another run.dir"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_finished(recipe: Recipe) -> bool:
    """Whether `run.dir` holds this very run with all its updates taken; UserError when it belongs to another run."""
    directory = RunDirectory(recipe.run.dir)
    if not directory.summary.exists():
        return False
    check_same_run(directory, recipe)
    return bool(json.loads(directory.summary.read_text(encoding="utf-8"))["updates"] >= recipe.schedule.total_updates)


def differing(old: Recipe, new: Recipe) -> list[str]:
    """The keys, as `section.key`, that differ between the recipes and change what is computed."""
    return [
        f"{name}.{key}"
        for name in Recipe.model_fields
        if name not in FREE_TO_CHANGE
        for key in sorted(getattr(old, name).model_fields_set | getattr(new, name).model_fields_set)
        if getattr(getattr(old, name), key) != getattr(getattr(new, name), key)
    ]


def check_same_run(directory: RunDirectory, new: Recipe) -> None:
    """Raise UserError when the directory belongs to a run whose recipe computes something else than `new`."""
    if not directory.recipe.exists():
        return
    allowed = {"schedule.stages", "run.dir", "run.collective_timeout_s", "optimizer.max_skipped"}
    if wrong := sorted(set(differing(load_recipe(directory.recipe), new)) - allowed):
        raise UserError(
            f"{directory.path} belongs to a run with other values of {', '.join(wrong)}; "
            "choose another run.dir, or resume with the recipe it holds"
        )
