"""What a command of `mugrpo` is, and the arguments and lines that several of them share.

Megatron and SGLang take seconds to import, so each command imports what it needs, after all that needs neither.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mugrpo_megatron import __version__
from mugrpo_megatron.engine.placement import rank_of_environment
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe

IMPORTING = "importing torch, transformers and Megatron"
CONTINUES = "the same command continues the run"
STARTS_OVER = "nothing was written, the same command starts over"

Parser = argparse.ArgumentParser
Options = argparse.Namespace


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    name: str
    help: str
    takes: Callable[[Parser], None]
    """Adds its arguments to its parser."""
    run: Callable[[Options], int]
    """Returns the exit code; raises as `cli.main` describes."""
    interrupted: str = STARTS_OVER
    """What a user who pressed Ctrl-C may do next."""
    long: bool = False
    """Whether it goes on when nothing reads its output any more; else it ends with 0: `mugrpo rollouts | head`."""
    stops: bool = False
    """Whether SIGTERM ends it with exit code 0 at any time, and the same command goes on."""


def takes_recipe(parser: Parser) -> None:
    """A recipe, overrides of it and a dry run."""
    parser.add_argument("recipe", type=Path, help="TOML file; the bundled ones are in run_scripts/recipes/")
    takes_overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, check it, and stop")


def takes_overrides(parser: Parser) -> None:
    """Overrides of the recipe's keys."""
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key"
    )


def with_recipe(
    options: Options, run: Callable[[Recipe], object], output: Callable[[Recipe], Path] = lambda recipe: recipe.run.dir
) -> int:
    """Load the recipe and `run` it, which writes to `output`; or print it and check it for `--dry-run`."""
    recipe = load_recipe(options.recipe, options.overrides, _remark if options.dry_run else say)
    if options.dry_run:
        from mugrpo_megatron.run.preflight import check_on_paper

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
