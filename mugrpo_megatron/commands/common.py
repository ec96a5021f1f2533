"""Arguments, lines and the way of a recipe that several commands share; nothing slow is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from mugrpo_megatron import __version__
from mugrpo_megatron.engine.placement import rank_of_environment
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe

Parser = argparse.ArgumentParser
Options = argparse.Namespace


def recipe_arguments(parser: Parser) -> None:
    """A recipe, overrides of it and a dry run."""
    parser.add_argument("recipe", type=Path, help="TOML file; the bundled ones are in run_scripts/recipes/")
    override_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, check it, and stop")


def override_arguments(parser: Parser, values: str = "VALUE", help: str = "override one key") -> None:
    """Overrides of the recipe's keys."""
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar=f"SECTION.KEY={values}", help=help
    )


def with_recipe(
    options: Options, run: Callable[[Recipe], object], output: Callable[[Recipe], Path] = lambda recipe: recipe.run.dir
) -> int:
    """Load the recipe and `run` it, which writes to `output`; or print it and check it for `--dry-run`."""
    recipe = load_recipe(options.recipe, options.overrides, _remark if options.dry_run else say)
    if options.dry_run:
        from mugrpo_megatron.checks.preflight import check_on_paper

        print(dump_recipe(recipe), end="", flush=True)
        check_on_paper(recipe, _remark)
        return 0
    say(visible(f"mugrpo {__version__}: {options.recipe} -> {output(recipe)}"))
    run(recipe)
    return 0


def _remark(line: str) -> None:
    """Print a line of a dry run beside the recipe."""
    print(f"mugrpo: {visible(line)}", file=sys.stderr)


def say(line: str) -> None:
    """Print a line at once, on the first rank alone."""
    if rank_of_environment() == 0:
        print(line, flush=True)
