"""The commands that train: `train`, `generate`, `optimize`, `sft`."""

from __future__ import annotations

from pathlib import Path

from mugrpo_megatron.commands.command import (
    CONTINUES,
    IMPORTING,
    Command,
    Options,
    Parser,
    say,
    takes_recipe,
    with_recipe,
)
from mugrpo_megatron.recipe import Recipe


def _train(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.directory import is_finished
        from mugrpo_megatron.run.preflight import check_run

        recipe, found = (recipe, None) if is_finished(recipe) else check_run(recipe, say)
        say(IMPORTING)
        from mugrpo_megatron.train import train

        train(recipe, found)

    return with_recipe(options, run)


def _takes_stage(parser: Parser) -> None:
    takes_recipe(parser)
    parser.add_argument("--stage", type=int, metavar="K", help="insist that this is the stage, from 0")


def _generate(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.preflight import check_run

        recipe, found = check_run(recipe, say)
        say(IMPORTING)
        from mugrpo_megatron.commands.separate import generate_alone

        generate_alone(recipe, options.stage, found)

    return with_recipe(options, run)


def _takes_optimize(parser: Parser) -> None:
    takes_recipe(parser)
    parser.add_argument("--stage", type=int, metavar="K", help="insist that this is the stage, from 0")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="take stage K of this run, or a published stage, into a new run.dir: the same responses and weights",
    )


def _optimize(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.preflight import check_run

        recipe, _ = check_run(recipe, say, generates=False)
        say(IMPORTING)
        from mugrpo_megatron.commands.separate import optimize_alone

        optimize_alone(recipe, options.stage, options.source)

    return with_recipe(options, run)


def _sft(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.commands.warm_start import is_warm_started
        from mugrpo_megatron.run.preflight import check_warm_start

        is_warm_started(recipe)
        recipe = check_warm_start(recipe, say)
        say(IMPORTING)
        from mugrpo_megatron.commands.sft import train

        train(recipe)

    return with_recipe(options, run)


TRAIN = Command("train", "stages of generate -> optimize, from a recipe", takes_recipe, _train, CONTINUES)
GENERATE = Command(
    "generate", "only generate, score and seal the stage at which a run stands", _takes_stage, _generate, CONTINUES
)
OPTIMIZE = Command(
    "optimize", "only take the updates of a sealed stage, without an engine", _takes_optimize, _optimize, CONTINUES
)
SFT = Command("sft", "supervised learning: a model on your rows, or a new one as a warm start", takes_recipe, _sft)
