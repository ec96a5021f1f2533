"""A whole run directory made in this process, and everything that a resumed run reads of it."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as torch_checkpoint

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.files import checkpoint_state
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.observe.log import open_log
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.recipe.sections import TrackSection
from mugrpo_megatron.run.checkpoints import check_stage_sealed, checkpoint_directories, newest_cursor
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.directory import RunDirectory, is_finished, open_directory
from mugrpo_megatron.run.inputs import record_data
from mugrpo_megatron.run.record import PROVENANCE, provenance, read_record
from mugrpo_megatron.samples import Problem, Sample
from mugrpo_megatron.stages.columns import LogprobColumn
from mugrpo_megatron.stages.manifest import Origin, check_stage
from mugrpo_megatron.stages.store import StageStore

UPDATES, PROMPTS = 2, 2
GROUPS = UPDATES * PROMPTS
STAGES = 2
"""Sealed ones; the next one is open."""
PROBLEMS = Problems([Problem("f:1", "1+1=", "2", "f")], [Problem("g:1", "1+2=", "3", "g")], [])
NOW = Cursor(1, 1, 3)
"""Where the run stands."""


@cache
def recipe(run_dir: Path, *overrides: str) -> Recipe:
    sizes = ["schedule.stages=3", f"schedule.updates_per_stage={UPDATES}", f"rollout.prompts_per_update={PROMPTS}"]
    return load_recipe(None, [f"run.dir={run_dir}", "model.path=/none", *sizes, *overrides])


def group(index: int, version: int) -> list[Sample]:
    ids = np.arange(3 + index, dtype=np.int32)
    logprobs = -np.arange(3 + index, dtype=np.float32) / 7
    return [Sample(index, f"f:{index}", ids[:2], ids, logprobs, float(r), version, "stop") for r in range(2)]


def stage_of(directory: RunDirectory, number: int) -> StageStore:
    record = read_record(directory.path)
    assert record
    return StageStore(directory.stage(number), origin=Origin(record.run_of_stage(number), number, number * UPDATES))


def fill(store: StageStore, number: int, groups: range = range(GROUPS)) -> None:
    for index in groups:
        if index not in store.verified_groups():
            store.append(group(index, number * UPDATES))
    store.flush()


def save(directory: RunDirectory, cursor: Cursor) -> None:
    """A checkpoint as the saver leaves it, of one data file of a few bytes."""
    record = read_record(directory.path)
    assert record
    partial = directory.checkpoints / f".{checkpoint_name(cursor)}.partial"
    partial.mkdir(exist_ok=True)
    for name, data in distributed().items():
        (partial / name).write_bytes(data)
    place = {"run": record.id, "cursor": {"stage": cursor.stage, "age": cursor.age, "updates": cursor.updates}}
    counters = {"updates_done": cursor.updates, "steps_done": cursor.updates, "model": {"family": "qwen2"}}
    state = {**place, **counters, "files": checkpoint_state.file_checksums(partial, 0, 1)}
    checkpoint_state.publish(partial, directory.checkpoints / checkpoint_name(cursor), state)


@cache
def distributed() -> dict[str, bytes]:
    """Index and data file of a distributed checkpoint of one tensor."""
    with TemporaryDirectory() as folder:
        writer = torch_checkpoint.FileSystemWriter(folder, single_file_per_rank=True)
        torch_checkpoint.save({"weight": torch.arange(16.0)}, storage_writer=writer, no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def logprobs(directory: RunDirectory, number: int, part: int = 2) -> None:
    store = stage_of(directory, number)
    with LogprobColumn(directory.behaviour(number), {"stage": store.content}).write() as append:
        for update in range(UPDATES):
            append([sample.engine_logprobs / part for sample in store.read_update(update)])


def make(run_dir: Path) -> Recipe:
    """A run in its second stage, and the third one begun by a run that went further and lost its last checkpoint."""
    made = recipe(run_dir)
    with open_directory(made) as directory:
        record_data(run_dir, PROBLEMS)
        for number in range(STAGES):
            fill(stage_of(directory, number), number)
            stage_of(directory, number).seal(UPDATES, PROMPTS)
            logprobs(directory, number)
        fill(stage_of(directory, STAGES), STAGES, range(3))
        for cursor in (Cursor(1, 0, 2), NOW):
            save(directory, cursor)
        with open_log(run_dir, TrackSection(tensorboard=False)) as log:
            for update in range(3):
                with log.phase("optimize", update // UPDATES):
                    log.update(update // UPDATES, update, update % UPDATES, {"loss": 0.5, "tokens": 9.0})
        write_json(directory.summary, {"updates": 3})
        record = read_record(run_dir)
        assert record
        directory.hf.mkdir()
        write_json(directory.hf / PROVENANCE, provenance(record))
    return made


def resume(made: Recipe) -> tuple[str, list[str]]:
    """All that a resumed run reads: a digest of what it trains on and where, and what it finds damaged on the way.

    Raises UserError where the run would refuse to start or to go on.
    """
    is_finished(made)
    found: list[str] = []
    sum_ = hashlib.sha256()
    with open_directory(made) as directory:
        record_data(directory.path, PROBLEMS)
        cursor = newest_cursor(directory.checkpoints)
        for one in checkpoint_directories(directory.checkpoints):
            found += filter(None, [checkpoint_state.first_damage(one, 0, 1)])
        check_stage(directory.stage(cursor.stage), stage_of(directory, cursor.stage)._origin)
        check_stage_sealed(directory, cursor)
        with open_log(directory.path, TrackSection(tensorboard=False), write=False):
            pass
        for number in range(STAGES):
            store = stage_of(directory, number)
            if not store.sealed:
                found.append(f"stage {number} is open")
                continue
            of: dict[str, Any] = {"stage": store.content}
            for update in range(UPDATES):
                own = LogprobColumn(directory.behaviour(number), of).read(update)
                for sample, learners in zip(store.read_update(update), own, strict=True):
                    arrays = sample.response_ids, sample.engine_logprobs, learners
                    sum_.update(b"".join(array.tobytes() for array in arrays))
                    sum_.update(f"{sample.reward} {sample.group}".encode())
            sum_.update(repr(store.rewards()).encode())
        if missing := set(range(3)) - stage_of(directory, STAGES).verified_groups():
            found.append(f"groups {missing} are generated again")
    return f"{cursor} {sum_.hexdigest()}", found


def content(path: Path) -> dict[str, bytes]:
    """Every file below a path, with its bytes, but for what each start writes."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in (".lock", "recipe.toml")
    }
