"""The directory of a warm start: whether it holds this recipe's, and its lock. Nothing slow is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import remove_leftovers
from mugrpo_megatron.files.hf_config import CONFIG
from mugrpo_megatron.files.outputs import check_output, make_directory
from mugrpo_megatron.observe.environment import rank_of_environment
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.run.directory import file_lock

RECIPE = "recipe.toml"
"""Written before training starts, so that an hf/ without it is not a warm start's."""


def is_warm_started(recipe: Recipe) -> bool:
    """Whether `sft.output` holds this recipe's warm start.

    Raises UserError when it holds the warm start of another recipe or an hf/ that no warm start wrote, or cannot be
    written.
    """
    out = recipe.sft.output
    remedy = "remove it, or choose another sft.output"
    check_output(out, f"sft.output = {out}", kind="directory", own=True)
    if not (out / RECIPE).exists():
        check_output(out / "hf", str(out / "hf"), kind="directory", remedy=f"no warm start wrote it; {remedy}")
        return False
    before = load_recipe(out / RECIPE)
    if _computed(before) != _computed(recipe):
        raise UserError(f"{out} holds the warm start of another recipe; {remedy}")
    if (out / "hf" / CONFIG).is_file():
        return True
    check_output(out / "hf", str(out / "hf"), kind="directory", remedy=f"it is not a warm start; {remedy}")
    return False


def _computed(recipe: Recipe) -> tuple[object, ...]:
    """What makes a warm start another one.

    Not the seed on a bundled task: runs of several seeds begin from one warm start.
    """
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
    """Hold the directory's lock on the first rank: two commands never write one warm start.

    What a killed one has left is removed.
    """
    if rank_of_environment() != 0:
        yield
        return
    make_directory(out, f"sft.output = {out}")
    with file_lock(out / ".lock"):
        for name in (RECIPE, "hf"):
            remove_leftovers(out, name)
        yield
