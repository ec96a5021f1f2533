"""The directory that `mugrpo sft` writes: its recipe and its lock. Nothing slow is imported.

A *warm start* is a model that `mugrpo sft` has trained on right answers, so that RL begins with some rewards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import check_output, make_directory, remove_leftovers
from mugrpo_megatron.files.hf_config import CONFIG
from mugrpo_megatron.observe.environment import rank_of_environment
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.run.directory import file_lock

RECIPE = "recipe.toml"
"""The recipe's file. It is written before training starts: an hf/ without it was not written by `mugrpo sft`."""


def check_warm_start_output(recipe: Recipe) -> None:
    """Raise UserError if `mugrpo sft` cannot write `sft.output`, or must not.

    It must not replace another recipe's result, or an hf/ that it did not write.
    """
    is_warm_started(recipe)


def is_warm_started(recipe: Recipe) -> bool:
    """Whether `sft.output` holds the finished result of `mugrpo sft` with this recipe.

    Raises UserError if it holds the result of another recipe, or an hf/ that `mugrpo sft` did not write, or cannot be
    written.
    """
    out = recipe.sft.output
    remedy = "remove it, or choose another sft.output"
    check_output(out, f"sft.output = {out}", kind="directory", own=True)
    if not (out / RECIPE).exists():
        check_output(out / "hf", str(out / "hf"), kind="directory", remedy=f"no warm start wrote it; {remedy}")
        return False
    before = load_recipe(out / RECIPE)
    if _identity(before) != _identity(recipe):
        raise UserError(f"{out} holds the warm start of another recipe; {remedy}")
    if (out / "hf" / CONFIG).is_file():
        return True
    check_output(out / "hf", str(out / "hf"), kind="directory", remedy=f"it has no {CONFIG}: no warm start; {remedy}")
    return False


def _identity(recipe: Recipe) -> tuple[object, ...]:
    """Returns the settings that decide the weights which `mugrpo sft` produces."""
    # For a bundled task the seed is not among them, so that recipes with several seeds can begin from one warm start.
    section = recipe.sft.model_copy(update={"lr": recipe.sft.peak_lr})
    if section.train is None:
        return section, recipe.data.train, recipe.model.dtype
    data = recipe.data
    rendering = (
        data.prompt_style,
        data.question_template,
        data.system_prompt,
        data.chat_template,
        data.template_arguments,
    )
    limits = data.max_prompt_tokens, recipe.rollout.max_response_tokens
    return section, recipe.model.path, recipe.model.revision, recipe.model.dtype, recipe.run.seed, rendering, limits


@contextmanager
def locked_warm_start(out: Path) -> Iterator[None]:
    """Hold the lock of the directory `out` on rank 0 during the block. First remove what killed commands left there."""
    if rank_of_environment() != 0:
        yield
        return
    make_directory(out, f"sft.output = {out}")
    with file_lock(out / ".lock"):
        for name in (RECIPE, "hf"):
            remove_leftovers(out, name)
        yield
