"""The code that several commands share: arguments, printing and the loading of recipes. Nothing slow is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mugrpo_megatron import __version__
from mugrpo_megatron.cuda import may_find_cuda
from mugrpo_megatron.observe.environment import bfloat16_products, rank_of_environment
from mugrpo_megatron.terminal import visible

if TYPE_CHECKING:
    from mugrpo_megatron.recipe import Recipe
    from mugrpo_megatron.recipe.policy import ModelSection

Parser = argparse.ArgumentParser
Options = argparse.Namespace
IMPORTING = "importing torch, transformers and Megatron"


def recipe_arguments(parser: Parser) -> None:
    """Add the arguments of a recipe: its file, overrides of its keys, and --dry-run."""
    recipe_argument(parser)
    override_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the keys that differ from the defaults, check the recipe, and stop",
    )
    parser.add_argument(
        "--dry-run=full", dest="dry_run", action="store_const", const="full", help="like --dry-run, and print every key"
    )


def recipe_argument(parser: Parser) -> None:
    parser.add_argument("recipe", type=Path, help="TOML file, or a bundled recipe such as one_gpu/24gb.toml")


def override_arguments(parser: Parser, values: str = "VALUE", help: str = "override one key") -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar=f"SECTION.KEY={values}", help=help
    )


def with_recipe(
    options: Options, run: Callable[[Recipe], object], output: Callable[[Recipe], Path] = lambda recipe: recipe.run.dir
) -> int:
    """Load the recipe and call `run` with it; with `--dry-run` print and check the recipe instead. Returns exit code 0.

    `output` gives the directory that the command will write to, for the line that it prints first.
    """
    # Not at the top: `mugrpo --help` should not wait for the import of pydantic.
    from mugrpo_megatron.recipe import dump_recipe, load_recipe

    recipe = load_recipe(options.recipe, options.overrides, _print_to_stderr if options.dry_run else say)
    if options.dry_run:
        from mugrpo_megatron.checks.preflight import check_on_paper

        print(dump_recipe(recipe, every=options.dry_run == "full"), end="", flush=True)
        check_on_paper(recipe, _print_to_stderr)
        return 0
    say(visible(f"mugrpo {__version__}: {options.recipe} -> {output(recipe)}"))
    run(recipe.model_copy(update={"model": with_dtype(recipe.model, say)}))
    return 0


def with_dtype(section: ModelSection, say: Callable[[str], None]) -> ModelSection:
    """Returns `[model]` with the dtype that this machine's CPU multiplies fastest; unchanged if the recipe sets a dtype
    or the machine may have CUDA.

    `say` gets a line about a dtype that is chosen here.
    """
    if "dtype" in section.model_fields_set or may_find_cuda():
        return section
    flag = bfloat16_products()
    dtype = "bfloat16" if flag else "float32"
    reason = f"these cores have {flag}" if flag else "these cores do not multiply bfloat16"
    say(f"model.dtype = {dtype}: {reason}")
    return section.model_copy(update={"dtype": dtype})


def _print_to_stderr(line: str) -> None:
    """Print a line of a dry run to stderr: stdout has the recipe and nothing else."""
    print(f"mugrpo: {visible(line)}", file=sys.stderr)


def say(line: str) -> None:
    """Print a line at once, on rank 0 alone."""
    if rank_of_environment() == 0:
        print(line, flush=True)
