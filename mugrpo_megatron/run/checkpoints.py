"""The run's checkpoints: one directory per cursor, saved asynchronously; a run resumes from the newest intact one."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint import STATE, read_state
from mugrpo_megatron.files.durable import remove_leftovers, resumable
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.recipe.sections import CheckpointSection
from mugrpo_megatron.run.cursor import Cursor

NAME = "stage[0-9][0-9][0-9][0-9][0-9]-age[0-9][0-9][0-9][0-9][0-9]"
GRACE_S = 10.0
"""How long a failing run waits for its current save."""


class Saver:
    """Saves the learner, one save at a time, in a thread with `checkpoint.asynchronous`. Every rank has one."""

    def __init__(self, learner: Learner, directory: Path, section: CheckpointSection) -> None:
        self._learner, self._directory, self._section = learner, directory, section
        self._group = dist.new_group(backend="gloo") if section.asynchronous else None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._began = time.monotonic()

    @property
    def overdue(self) -> bool:
        """Whether `checkpoint.every_minutes` have passed since the last save began, by this rank's clock."""
        minutes = self._section.every_minutes
        return minutes > 0 and time.monotonic() - self._began >= 60 * minutes

    def save(self, cursor: Cursor) -> None:
        """Save the learner at `cursor`, then remove all but the newest checkpoints. Collective.

        With `checkpoint.asynchronous` this returns when the state is copied. Raises what the previous save raised, so
        a full disk ends the run at the next save at the latest.
        """
        self.wait()
        self._began = time.monotonic()
        write = checkpoint.begin_save(
            self._learner,
            self._directory / checkpoint_name(cursor),
            asdict(cursor),
            self._group,
            copy=self._section.asynchronous,
        )
        if self._section.asynchronous:
            self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            write()
            self._remove_old()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the last save is durable; raises what it raised."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, write: Callable[[], None]) -> None:
        try:
            if self._learner.ranks.device.type == "cuda":
                # A new thread has device 0, where the writer's streams would take memory from another rank.
                torch.cuda.set_device(self._learner.ranks.device)
            write()
            self._remove_old()
        except BaseException as error:
            self._failure = error

    def _remove_old(self) -> None:
        if self._learner.ranks.rank == 0:
            for old in complete(self._directory)[: -self._section.keep]:
                shutil.rmtree(old)


@contextmanager
def open_saver(learner: Learner, directory: Path, section: CheckpointSection) -> Iterator[Saver]:
    """A saver whose last save is durable when the block ends; a block that raises waits `GRACE_S` for it."""
    saver = Saver(learner, directory, section)
    try:
        yield saver
    except BaseException:
        with suppress(Exception):  # the block's own error matters more, and the previous checkpoint is complete
            saver.wait(GRACE_S)
        raise
    saver.wait()


def restore_newest(learner: Learner, directory: Path, say: Callable[[str], None]) -> Cursor:
    """Load the newest intact checkpoint, if there is one, and return its cursor. Collective.

    Damaged ones are reported through `say` and renamed. Raises UserError when all checkpoints are damaged, since the
    run would silently start over.
    """
    if learner.ranks.rank == 0:
        for leftover in directory.glob(resumable(Path(NAME)).name):  # of a save that was killed
            shutil.rmtree(leftover)
        remove_leftovers(directory, NAME)
    found = [complete(directory) if learner.ranks.rank == 0 else []]
    dist.broadcast_object_list(found)
    damaged: list[tuple[Path, str]] = []
    for candidate in reversed(found[0]):
        damage = checkpoint.find_damage(learner, candidate)
        if damage is None:
            break
        damaged.append((candidate, damage))
    else:
        if damaged:
            raise UserError(
                f"every checkpoint in {directory} is damaged ({damaged[0][1]}); restore one from a copy, or remove "
                "them all to restart training at the run's first stage, whose responses are kept"
            )
        return Cursor()
    if learner.ranks.rank == 0:
        for path, damage in damaged:
            path.rename(path.with_name(f"{path.name}.damaged"))
            say(f"{damage}; the run resumes from {candidate.name}")
    return Cursor(**checkpoint.load(learner, candidate))


def newest_cursor(directory: Path) -> Cursor:
    """The newest complete checkpoint's cursor; the run's start without one."""
    for candidate in reversed(complete(directory)):
        try:
            return Cursor(**read_state(candidate)["cursor"])
        except UserError:
            continue  # `restore_newest` reports it
    return Cursor()


def checkpoint_name(cursor: Cursor) -> str:
    """The directory of the checkpoint from which a run resumes at `cursor`."""
    return f"stage{cursor.stage:05d}-age{cursor.age:05d}"


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first; names sort as cursors do."""
    return sorted(path.parent for path in directory.glob(f"{NAME}/{STATE}"))
