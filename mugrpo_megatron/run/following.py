"""What a process with `--follow` does next: wait, generate its share of the offered stage, or exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.run.batch import Standing
from mugrpo_megatron.run.data import FILE_NAME, check_data
from mugrpo_megatron.run.directory import RunDirectory, check_directory
from mugrpo_megatron.run.prefetch import read_mark
from mugrpo_megatron.run.record import read_record


def has_begun(directory: RunDirectory) -> bool:
    """Whether a learner or a share has made the run that `directory` is to hold."""
    return directory.recipe.exists() and (directory.path / FILE_NAME).exists()


def offered_stages(recipe: Recipe, found: Problems, wait: Callable[[], bool]) -> Iterator[tuple[Standing, Recipe]]:
    """Every stage that the run's learner offers, once each, with the recipe under the run's own schedule.

    Ends after the run's last stage, when the run is finished, and once `wait()`, which is called between two looks, is
    False. Raises UserError when the directory is another run's, or its problems are others.
    """
    directory, last = RunDirectory(recipe.run.dir), -1
    checked = False
    while True:
        if has_begun(directory):
            if not checked:
                check_directory(recipe)
                check_data(directory.path, found)
                checked = True
            schedule = load_recipe(directory.recipe).schedule  # the learner may have been given more stages
            record = read_record(directory.path)
            mark = read_mark(directory, record) if record else None
            if mark and not mark.samples and mark.cursor.finished(schedule):
                return
            if record and mark and mark.samples and mark.samples.stage > last:
                start, last = mark.samples, mark.samples.stage
                where = Standing(record, start, directory.hf, mark.cursor.updates)
                yield where, recipe.model_copy(update={"schedule": schedule})
                if start.next_stage(schedule, start.stage_updates(schedule)).finished(schedule):
                    return
        if not wait():
            return
