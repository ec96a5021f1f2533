"""A finished run shows its results again. Neither Megatron nor transformers is imported here."""

from __future__ import annotations

from mugrpo_megatron.engine.placement import rank_of_environment
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.report.report import FILE_NAME
from mugrpo_megatron.report.summary import summarize, summary_table
from mugrpo_megatron.run.directory import RunDirectory, is_finished


def show_finished(recipe: Recipe) -> bool:
    """Whether `run.dir` holds this run, finished; the main rank then shows its results.

    Raises UserError when the directory belongs to another run.
    """
    if not is_finished(recipe):
        return False
    directory = RunDirectory(recipe.run.dir)
    with open_display(show=rank_of_environment() == 0) as display:
        display.say(f"{directory.path} is finished; choose another run.dir for a new run")
        show(directory, display)
    return True


def show(directory: RunDirectory, display: Display) -> None:
    """Print a finished run's table and the paths of its results."""
    display.table(summary_table(summarize(directory.path)))
    display.say(f"Hugging Face checkpoint: {directory.hf}\nreport: {directory.path / FILE_NAME}")
