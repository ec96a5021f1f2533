"""The table of `mugrpo`'s commands: what each takes, and the function that it calls.

Megatron and SGLang take seconds to import, so each command imports what it needs, after all that needs neither.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mugrpo_megatron import __version__
from mugrpo_megatron.engine.placement import rank_of_environment
from mugrpo_megatron.observe.visible import visible
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


def _takes_recipe(parser: Parser) -> None:
    parser.add_argument("recipe", type=Path, help="TOML file; the bundled ones are in run_scripts/recipes/")
    _takes_overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, check it, and stop")


def _takes_overrides(parser: Parser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key"
    )


def _with_recipe(options: Options, run: Callable[[Recipe], object]) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    if options.dry_run:
        from mugrpo_megatron.run.preflight import check_on_paper

        print(dump_recipe(recipe), end="", flush=True)
        check_on_paper(recipe, lambda line: print(f"mugrpo: {visible(line)}", file=sys.stderr))
        return 0
    say(visible(f"mugrpo {__version__}: {options.recipe} -> {recipe.run.dir}"))
    run(recipe)
    return 0


def say(line: str) -> None:
    """Print a line at once, on the first rank alone."""
    if rank_of_environment() == 0:
        print(line, flush=True)


def _train(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.directory import is_finished
        from mugrpo_megatron.run.preflight import check_run

        found = None if is_finished(recipe) else check_run(recipe, say)
        say(IMPORTING)
        from mugrpo_megatron.train import train

        train(recipe, found)

    return _with_recipe(options, run)


def _takes_stage(parser: Parser) -> None:
    _takes_recipe(parser)
    parser.add_argument("--stage", type=int, metavar="K", help="insist that this is the stage, from 0")


def _generate(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.preflight import check_run

        found = check_run(recipe, say)
        say(IMPORTING)
        from mugrpo_megatron.commands.separate import generate_alone

        generate_alone(recipe, options.stage, found)

    return _with_recipe(options, run)


def _takes_optimize(parser: Parser) -> None:
    _takes_recipe(parser)
    parser.add_argument("--stage", type=int, metavar="K", help="insist that this is the stage, from 0")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="RUN_DIR",
        help="take stage K of this run into a new run.dir: another objective on the same responses and weights",
    )


def _optimize(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.preflight import check_run

        check_run(recipe, say, generates=False)
        say(IMPORTING)
        from mugrpo_megatron.commands.separate import optimize_alone

        optimize_alone(recipe, options.stage, options.source)

    return _with_recipe(options, run)


def _sft(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.commands.warm_start import is_warm_started
        from mugrpo_megatron.run.preflight import check_warm_start

        check_warm_start(recipe)
        is_warm_started(recipe)
        say(IMPORTING)
        from mugrpo_megatron.commands.sft import train

        train(recipe)

    return _with_recipe(options, run)


def _takes_eval(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="Hugging Face checkpoint directory")
    parser.add_argument("--data", nargs="+", required=True, metavar="SET", help="files, bundled tasks or preset names")
    parser.add_argument("--samples", type=int, metavar="K", help="responses to each problem: eval.samples")
    parser.add_argument("--temperature", type=float, help="eval.temperature; 0 is greedy")
    parser.add_argument("--out", type=Path, help="where results go; the same directory continues an evaluation")
    parser.add_argument(
        "--recipe", type=Path, help="take every other setting from this recipe, what it says of single sets too"
    )
    _takes_overrides(parser)


def _eval(options: Options) -> int:
    from mugrpo_megatron.commands.eval import run

    chosen = [
        f"model.path={json.dumps(str(options.model), ensure_ascii=False)}",  # a directory may be called 7 or true
        *(
            f"eval.{key}={value}"
            for key, value in (("samples", options.samples), ("temperature", options.temperature))
            if value is not None
        ),
        *options.overrides,
    ]
    run(load_recipe(options.recipe, chosen), options.data, options.out or options.model / "eval")
    return 0


def _takes_score(parser: Parser) -> None:
    parser.add_argument("input", type=Path, help="JSON lines, Parquet, a JSON array or CSV")
    parser.add_argument("--out", type=Path, required=True, help="the same rows in the same order, with their scores")
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it exists; never the input")
    parser.add_argument("--skip-malformed", action="store_true", help="count malformed rows instead of stopping at one")
    _takes_overrides(parser)


def _score(options: Options) -> int:
    from mugrpo_megatron.commands.score import run

    section = load_recipe(None, options.overrides).reward
    print(run(options.input, options.out, section, strict=not options.skip_malformed, overwrite=options.overwrite))
    return 0


def _takes_plan(parser: Parser) -> None:
    parser.add_argument("recipe", type=Path, help="TOML file; the bundled ones are in run_scripts/recipes/")
    _takes_overrides(parser)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8, help="with --gpu cpu: ranks on each node")
    parser.add_argument("--gpu", default="h200", help="h200, h100, a100, b200 or cpu")
    parser.add_argument("--model-config", type=Path, help="config.json of a model that is not on this machine")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="replace an assumed rate")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")


def _plan(options: Options) -> int:
    from mugrpo_megatron.plan.plan import make_plan
    from mugrpo_megatron.plan.printing import print_json, print_plan

    recipe = load_recipe(options.recipe, options.overrides)
    cluster = options.nodes, options.gpus_per_node, options.gpu
    plan = make_plan(recipe, *cluster, options.model_config, options.assume)
    (print_json if options.json else print_plan)(plan)
    return 0


def _takes_rollouts(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--stage", type=int, metavar="K", help="from 0; the newest sealed one otherwise")
    parser.add_argument("--update", type=int, metavar="N", help="only the responses of this update of the stage")
    parser.add_argument("--group", type=int, metavar="N", help="one group in full, its triggers marked")
    parser.add_argument("--min-reward", type=float, metavar="R")
    parser.add_argument("--max-reward", type=float, metavar="R")
    parser.add_argument("--advantage", choices=["positive", "negative", "zero"])
    parser.add_argument("--vetoed", action="store_true", help="only responses that the veto takes tokens out of")
    parser.add_argument(
        "--policy", type=Path, metavar="DIR", help="Hugging Face checkpoint that the veto compares with; RUN_DIR/hf"
    )
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="at most this many responses")
    _takes_overrides(parser)


def _rollouts(options: Options) -> int:
    from mugrpo_megatron.commands.rollouts import Selection, browse

    selection = Selection(
        update=options.update,
        group=options.group,
        min_reward=options.min_reward,
        max_reward=options.max_reward,
        advantage=options.advantage,
        vetoed=options.vetoed,
        limit=options.limit,
    )
    browse(options.run_dir, options.stage, selection, options.policy, options.overrides)
    return 0


def _takes_report(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path, nargs="+", help="several share one page")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="the page of several runs")
    parser.add_argument("--live", action="store_true", help="serve the page on this machine while the run goes on")
    parser.add_argument("--port", type=int, default=0, help="of --live; a free one by default")


def _report(options: Options) -> int:
    from mugrpo_megatron.commands.report import report

    report(options.run_dir, options.out, options.live, options.port)
    return 0


def _doctor(options: Options) -> int:
    from mugrpo_megatron.commands.doctor import doctor

    return doctor()


COMMANDS = (
    Command("train", "stages of generate -> optimize, from a recipe", _takes_recipe, _train, CONTINUES),
    Command(
        "generate",
        "only generate, score and seal the stage at which a run stands",
        _takes_stage,
        _generate,
        CONTINUES,
    ),
    Command(
        "optimize",
        "only take the updates of a sealed stage, without an engine",
        _takes_optimize,
        _optimize,
        CONTINUES,
    ),
    Command("sft", "warm start: a small model by supervised learning", _takes_recipe, _sft),
    Command(
        "eval",
        "accuracy of a checkpoint on data sets: mean@k, pass@k, majority@k",
        _takes_eval,
        _eval,
        "the same command continues the evaluation",
    ),
    Command("score", "score a file of responses: rows {response, answer} gain a reward", _takes_score, _score),
    Command("plan", "memory, time and layouts of a run on any cluster, on paper", _takes_plan, _plan),
    Command(
        "rollouts",
        "look at a stage's responses, and at what the veto takes out of them",
        _takes_rollouts,
        _rollouts,
    ),
    Command("report", "a page about a run, or about several; live while a run goes on", _takes_report, _report),
    Command("doctor", "what this machine has, what it is used for, what is missing", lambda parser: None, _doctor),
)
