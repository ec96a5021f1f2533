"""Saves a run's checkpoints, a directory for each cursor, and finds the newest intact one, from which a run resumes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import STATE, read_state
from mugrpo_megatron.files.durable import remove, remove_leftovers, resumable
from mugrpo_megatron.learner import checkpoint
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.recipe.sections import CheckpointSection
from mugrpo_megatron.run.cursor import CHECKPOINTS, Cursor, checkpoint_name
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.record import RunRecord
from mugrpo_megatron.run.stopping import AllStopped, Stopped
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.hf import gather_hf, save_hf


class BackgroundSave:
    """Runs one save at a time in a thread called `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, save: Callable[[], None]) -> None:
        """Start `save` in the thread; `wait` must have been called since the last start."""

        def run() -> None:
            try:
                save()
            except BaseException as error:
                self._failure = error

        # The thread is a daemon: otherwise a failing run could not end while the save hangs on a file system that no
        # longer answers.
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the last save has ended, or `timeout_s` has passed. If the save failed, raises its exception."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


GRACE_S = 10.0
"""The longest time that a failing run waits for a checkpoint in progress, and again for hf/."""


class Saver:
    """Saves the learner's checkpoints and the run's hf/, at most one of each at a time. Every rank has a Saver.

    With `checkpoint.asynchronous` a thread writes while training continues.
    """

    def __init__(self, learner: Learner, directory: Path, section: CheckpointSection, run: str) -> None:
        """`run` is the run's id, written into every checkpoint."""
        self._learner, self._directory, self._section, self._run = learner, directory, section, run
        # The writing thread has a process group of its own, since its collectives must not interleave with the
        # learner's. Megatron forks a process to write instead (core/dist_checkpointing/strategies/async_utils.py).
        timeout = timedelta(seconds=learner.recipe.run.collective_timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if section.asynchronous else None
        self._checkpoint, self._hf = BackgroundSave("checkpoint"), BackgroundSave("hf")

    def save(self, cursor: Cursor) -> None:
        """Save the learner at `cursor`, then remove all but the newest `checkpoint.keep` checkpoints. Collective.

        With `checkpoint.asynchronous` this returns when the state is copied to host memory. If the previous save
        failed, its exception is raised here, so a full disk ends the run at the next save at the latest.
        """
        self._checkpoint.wait()
        path = self._directory / checkpoint_name(cursor)
        state = {"run": self._run, "cursor": asdict(cursor)}
        write = checkpoint.begin_save(self._learner, path, state, self._group, copy=self._section.asynchronous)
        if self._section.asynchronous:
            self._checkpoint.start(lambda: self._write(write))
        else:
            write()
            self._remove_old()

    def save_hf(self, like: Path, out: Path, notes: Mapping[str, Any]) -> None:
        """Write the policy as a Hugging Face checkpoint `out`, replacing an earlier one. Collective.

        With `checkpoint.asynchronous` this returns when rank 0 has the weights in host memory, and a thread writes
        them; if the previous call's write failed, its exception is raised here. Config and tokenizer are copied from
        `like`; `notes` are JSON objects to write beside them, by file name.
        """
        self._hf.wait()
        chunks, model = self._learner.models, self._learner.architecture
        notes = {**notes, **self._learner.adapter_files()}
        if not self._section.asynchronous:
            save_hf(chunks, model, like, out, replace=True, notes=notes)
            return
        self._hf.start(gather_hf(chunks, model, like, out, notes))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the last checkpoint and hf/ are on disk, for each at most `timeout_s`.

        If a save failed, raises its exception.
        """
        try:
            self._checkpoint.wait(timeout_s)
        finally:
            self._hf.wait(timeout_s)

    def _write(self, write: Callable[[], None]) -> None:
        if self._learner.ranks.device.type == "cuda":
            # A new thread begins on device 0, where the writer's streams would take memory from another rank.
            torch.cuda.set_device(self._learner.ranks.device)
        write()
        self._remove_old()

    def _remove_old(self) -> None:
        if self._learner.ranks.rank == 0:
            for old in complete_checkpoints(self._directory)[: -self._section.keep]:
                leftover = resumable(old)  # renamed first, so that a kill leaves no half of it with a checkpoint's name
                old.rename(leftover)
                shutil.rmtree(leftover)


@contextmanager
def open_saver(
    learner: Learner, directory: Path, section: CheckpointSection, run: str, log: MetricLog
) -> Iterator[Saver]:
    """A block with a saver, whose last save is on disk when the block has ended, also when the run is stopped.

    After an error it waits at most `GRACE_S` for a checkpoint in progress, and again for hf/. When all ranks stop
    together (AllStopped), the learner is saved at the cursor at which they stop.
    """
    saver = Saver(learner, directory, section, run)
    try:
        yield saver
    except AllStopped as stopped:
        saver.wait()
        newest = [learner.ranks.rank == 0 and newest_cursor(directory)]
        dist.broadcast_object_list(newest)
        if newest[0] != stopped.cursor:
            # The learner may be offloaded, if the engines had the devices; the engines have ended, so it fits again.
            learner.reload()
            with log.phase("save", stopped.cursor.stage):
                saver.save(stopped.cursor)
            saver.wait()
        raise
    except Stopped:
        saver.wait()
        raise
    except BaseException:
        with suppress(Exception):  # an error of the `with` block matters more, and the previous checkpoint is complete
            saver.wait(GRACE_S)
        raise
    saver.wait()


def restore_newest(learner: Learner, directory: Path, record: RunRecord, say: Callable[[str], None]) -> Cursor:
    """Load the newest intact checkpoint and return its cursor; without a checkpoint, the run's start. Collective.

    Checkpoints newer than the loaded one are damaged or incomplete: rank 0 renames them and calls `say` for each.
    Raises UserError when all checkpoints are damaged, and when the newest intact one belongs to another run, to another
    model, or to another cursor than its name says.
    """
    is_main = learner.ranks.rank == 0
    if is_main:
        # Remove what a save or a removal that was killed has left.
        for leftover in directory.glob(resumable(Path(CHECKPOINTS)).name):
            remove(leftover)
        remove_leftovers(directory, CHECKPOINTS)
    # Rank 0 lists the checkpoints for all ranks: another node may not yet see the newest one on the shared file system.
    candidates = [checkpoint_directories(directory) if is_main else []]
    dist.broadcast_object_list(candidates)
    damaged: list[tuple[Path, str]] = []
    for candidate in reversed(candidates[0]):
        damage = checkpoint.find_damage(learner, candidate)
        if damage is None:
            break
        damaged.append((candidate, damage))
    else:
        if damaged:
            raise _all_damaged(directory, damaged[0][1])  # without this error the run would silently start over
        return Cursor()
    check_checkpoint_identity(candidate, record)
    if is_main:
        for path, damage in damaged:
            damaged_path = _free_name(path)
            path.rename(damaged_path)
            say(f"{damage}; it is kept as {damaged_path.name}, and the run resumes from {candidate.name}")
    return Cursor(**checkpoint.load(learner, candidate)["cursor"])


def newest_cursor(directory: Path) -> Cursor:
    """The cursor of the newest checkpoint whose state is intact; without a checkpoint, the run's start.

    Raises UserError when the states of all checkpoints are missing or damaged.
    """
    problem = ""
    for candidate in reversed(checkpoint_directories(directory)):
        try:
            return Cursor(**read_state(candidate)["cursor"])
        except UserError as error:
            problem = problem or str(error)  # not raised here: an older checkpoint may be intact
    if problem:
        raise _all_damaged(directory, problem)
    return Cursor()


def checkpoint_directories(directory: Path) -> list[Path]:
    """The directories that have a checkpoint's name, complete or damaged, oldest first: names sort as cursors do."""
    return sorted(path for path in directory.glob(CHECKPOINTS) if path.is_dir())


def complete_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints that have their state file, which is written last, from the oldest to the newest."""
    return [path for path in checkpoint_directories(directory) if (path / STATE).exists()]


def check_stage_sealed(directory: RunDirectory, cursor: Cursor) -> None:
    """Raise UserError when the cursor is inside a stage that is not sealed.

    Its missing responses cannot be sampled any more, because the weights have changed since the stage's start.
    """
    stage = directory.stage(cursor.stage)
    if cursor.age > 0 and not StageStore(stage).sealed:
        raise UserError(
            f"{stage} is incomplete, but the run has taken {cursor.age:,} of its updates; restore it from a "
            f"copy, or remove the checkpoints after {checkpoint_name(Cursor(cursor.stage))} from "
            f"{directory.checkpoints}: the run then resumes at the stage's start and generates it again"
        )


def check_checkpoint_identity(path: Path, record: RunRecord) -> None:
    """Raise UserError when an intact checkpoint belongs to another run, or to another cursor than its name says."""
    state = read_state(path)
    cursor = Cursor(**state["cursor"])
    if path.name != checkpoint_name(cursor):
        name = checkpoint_name(cursor)
        raise UserError(
            f"{path} holds the checkpoint {name}; give it this name (and move a directory that has the name away)"
        )
    # The checkpoint at the start of a branch was saved by the run that it branches from.
    run = record.run_of_stage(cursor.stage) if cursor.age == 0 else record.id
    if state.get("run") != run:
        raise UserError(f"{path} is a checkpoint of run {state.get('run')}, not of {run}; move it away")


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged{f'-{n}' if n > 1 else ''}") for n in count(1))
    return next(name for name in names if not os.path.lexists(name))


def _all_damaged(directory: Path, damage: str) -> UserError:
    return UserError(
        f"every checkpoint in {directory} is damaged ({damage}); restore one from a copy, or remove them all to "
        "restart training at the run's first stage, whose responses are kept"
    )
