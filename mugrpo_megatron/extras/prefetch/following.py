"""Stages generated ahead: the next one while the learner trains on the one before, in a place of its own.

    RUN_DIR/ahead/00003/weights/    the weights that sample stage 3: hard links to hf/, which goes on changing
    RUN_DIR/ahead/00003/stage/      its groups; renamed to stages/00003 once it is sealed

The learner writes hf/ when `schedule.max_sample_age` updates of a stage are left. Every process that generates the next
stage holds stages/00003.lock, and the learner waits for it; when the last of them has gone without sealing the stage,
the learner generates it itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.prefetch.shares import Position, close_stage
from mugrpo_megatron.files.durable import durable_directory, publish, remove_leftovers
from mugrpo_megatron.files.hf_config import CURSOR
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.data import FILE_NAME, check_data
from mugrpo_megatron.run.directory import RunDirectory, check_directory, lock_soon
from mugrpo_megatron.run.origin import hf_cursor
from mugrpo_megatron.run.record import MARK, Record, read_record
from mugrpo_megatron.stages.store import StageStore


def has_begun(directory: RunDirectory) -> bool:
    """Whether a learner or a share has made the run that `directory` is to hold."""
    return directory.recipe.exists() and (directory.path / FILE_NAME).exists()


def stages_ahead(recipe: Recipe, problems: Problems, wait: Callable[[], bool]) -> Iterator[tuple[Position, Recipe]]:
    """Every stage that can be sampled ahead, as the learner comes to it, with the recipe under the run's own schedule.

    Ends after the run's last stage, when the run is finished, and once `wait()`, which is called between two looks, is
    False. Raises UserError when the directory is another run's, or its problems are others.
    """
    directory, last, checked = RunDirectory(recipe.run.dir), -1, False
    while True:
        if has_begun(directory):
            if not checked:
                check_directory(recipe)
                check_data(directory.path, problems)
                checked = True
            schedule = load_recipe(directory.recipe).schedule  # the learner may have been given more stages
            run_recipe = recipe.model_copy(update={"schedule": schedule})
            record = read_record(directory.path)
            cursor = hf_cursor(directory, record) if record else None
            if cursor and cursor.finished(schedule):
                return
            position = stage_ahead(directory, run_recipe, record, cursor or Cursor()) if record else None
            if position and position.cursor.stage > last:
                last = position.cursor.stage
                yield position, run_recipe
                start = position.cursor
                if start.next_stage(schedule, start.stage_updates(schedule)).finished(schedule):
                    return
        if not wait():
            return


def stage_ahead(directory: RunDirectory, recipe: Recipe, record: Record, cursor: Cursor) -> Position | None:
    """The stage after the cursor's, if the weights at the cursor may sample it and nobody has begun it otherwise."""
    stage = StageStore(directory.stage(cursor.stage))
    if not stage.sealed:
        return None
    start = cursor.next_stage(recipe.schedule, stage.updates)
    late = start.updates - cursor.updates > recipe.schedule.max_sample_age
    if late or start.finished(recipe.schedule) or directory.stage(start.stage).exists():
        return None
    place = ahead(directory, start.stage)
    return Position(record, start, place / "weights", cursor.updates, place / "stage")


def ahead(directory: RunDirectory, stage: int) -> Path:
    return directory.path / "ahead" / f"{stage:05d}"


def claimed(directory: RunDirectory, recipe: Recipe, position: Position) -> Position:
    """The position with weights that no later hf/ replaces: the first process that claims the stage chooses them."""
    place = ahead(directory, position.cursor.stage)
    weights = place / "weights"
    with lock_soon(directory.logs / "ahead.lock"):
        while not place.exists():
            before = hf_cursor(directory, position.record)
            remove_leftovers(place.parent, place.name)
            with durable_directory(place) as partial, suppress(FileNotFoundError):
                if before:
                    shutil.copytree(directory.hf, partial / "weights", copy_function=os.link)
            if hf_cursor(directory, position.record) != before:  # hf/ was replaced meanwhile
                shutil.rmtree(place)
    if not weights.exists():  # a run's first weights
        return Position(position.record, position.cursor, recipe.model.directory, 0, position.stage)
    version = Cursor(**CURSOR.validate_python(read_json(weights / MARK)["cursor"])).updates
    if not 0 <= position.cursor.updates - version <= recipe.schedule.max_sample_age:
        raise UserError(
            f"{weights} holds the weights after {version} updates, which may not sample a stage that begins after "
            f"{position.cursor.updates}; remove {place}"
        )
    return Position(position.record, position.cursor, weights, version, position.stage)


def seal_ahead(directory: RunDirectory, recipe: Recipe, position: Position) -> bool:
    """Seal the stage if all groups of all shares are on disk, and put it where the learner finds it; whether it is."""
    place, target = ahead(directory, position.cursor.stage), directory.stage(position.cursor.stage)
    with lock_soon(directory.logs / "ahead.lock"):
        if target.exists():  # sealed by another share, or the learner generates it
            shutil.rmtree(place, ignore_errors=True)
            return True
        count = position.cursor.stage_updates(recipe.schedule) * recipe.rollout.prompts_per_update
        if not StageStore(position.stage, 0, position.origin).named().issuperset(range(count)):
            return False
        close_stage(recipe, position)
        publish(position.stage, target, replace=False)
        shutil.rmtree(place, ignore_errors=True)
    return True
