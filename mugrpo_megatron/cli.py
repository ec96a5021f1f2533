"""The `mugrpo` command: parses, calls one function, turns failures into exit codes."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from mugrpo_megatron import __version__
from mugrpo_megatron.engine.placement import rank_of_environment
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, TrainingFailure, UserError
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe
from mugrpo_megatron.run.stopping import Stopped

IMPORTING = "importing torch, transformers and Megatron"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns 0 when done and 2 on the user's mistake. Any other failure is a bug: traceback and 1."""
    options = _parser().parse_args(arguments)
    # Megatron and torch warn of what `mugrpo doctor` reports in full.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except UserError as error:
        print(f"mugrpo: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        _say(f"mugrpo: stopped as asked: {stopped}. The same command continues the run")
        return stopped.code
    except TrainingFailure as error:
        print(f"mugrpo: {error}", file=sys.stderr)
        return 1
    except (EngineFailure, CollectiveFailure) as error:
        print(f"mugrpo: {error}\nThe same command continues the run.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mugrpo: interrupted; the same command continues the run", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mugrpo", description="mu-GRPO with Megatron-core and SGLang")
    parser.add_argument("--version", action="version", version=f"mugrpo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="stages of generate -> optimize, from a recipe")
    _takes_recipe(train)
    train.set_defaults(command=_train)

    generate = commands.add_parser("generate", help="only generate, score and seal the stage at which a run stands")
    _takes_recipe(generate)
    generate.add_argument("--stage", type=int, metavar="K", help="insist that this is the stage, from 0")
    generate.set_defaults(command=_generate)

    optimize = commands.add_parser("optimize", help="only take the updates of a sealed stage, without an engine")
    _takes_recipe(optimize)
    optimize.add_argument("--stage", type=int, metavar="K", help="insist that this is the stage, from 0")
    optimize.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="RUN_DIR",
        help="take stage K of this run into a new run.dir: another objective on the same responses and weights",
    )
    optimize.set_defaults(command=_optimize)

    sft = commands.add_parser("sft", help="warm start: a small model by supervised learning")
    _takes_recipe(sft)
    sft.set_defaults(command=_sft)

    evaluate = commands.add_parser("eval", help="accuracy of a checkpoint on data sets: mean@k, pass@k, majority@k")
    evaluate.add_argument("model", type=Path, help="Hugging Face checkpoint directory")
    evaluate.add_argument(
        "--data", nargs="+", required=True, metavar="SET", help="files, bundled tasks or preset names"
    )
    evaluate.add_argument("--samples", type=int, metavar="K", help="responses to each problem: eval.samples")
    evaluate.add_argument("--temperature", type=float, help="eval.temperature; 0 is greedy")
    evaluate.add_argument("--out", type=Path, help="where results go; the same directory continues an evaluation")
    evaluate.add_argument(
        "--recipe", type=Path, help="take every other setting from this recipe, what it says of single sets too"
    )
    _takes_overrides(evaluate)
    evaluate.set_defaults(command=_eval)

    score = commands.add_parser("score", help="score a file of responses: rows {response, answer} gain a reward")
    score.add_argument("input", type=Path, help=".jsonl or .parquet")
    score.add_argument("--out", type=Path, required=True, help="the same rows in the same order, with their scores")
    score.add_argument("--skip-malformed", action="store_true", help="count malformed rows instead of stopping at one")
    _takes_overrides(score)
    score.set_defaults(command=_score)

    plan = commands.add_parser("plan", help="memory, time and layouts of a run on any cluster, on paper")
    plan.add_argument("recipe", type=Path, help="TOML file; the bundled ones are in run_scripts/recipes/")
    _takes_overrides(plan)
    plan.add_argument("--nodes", type=int, default=1)
    plan.add_argument("--gpus-per-node", type=int, default=8, help="with --gpu cpu: ranks on each node")
    plan.add_argument("--gpu", default="h200", help="h200, h100, a100, b200 or cpu")
    plan.add_argument("--model-config", type=Path, help="config.json of a model that is not on this machine")
    plan.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="replace an assumed rate")
    plan.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    plan.set_defaults(command=_plan)

    rollouts = commands.add_parser(
        "rollouts", help="look at a stage's responses, and at what the veto takes out of them"
    )
    rollouts.add_argument("run_dir", type=Path)
    rollouts.add_argument("--stage", type=int, metavar="K", help="from 0; the newest sealed one otherwise")
    rollouts.add_argument("--update", type=int, metavar="N", help="only the responses of this update of the stage")
    rollouts.add_argument("--group", type=int, metavar="N", help="one group in full, its triggers marked")
    rollouts.add_argument("--min-reward", type=float, metavar="R")
    rollouts.add_argument("--max-reward", type=float, metavar="R")
    rollouts.add_argument("--advantage", choices=["positive", "negative", "zero"])
    rollouts.add_argument("--vetoed", action="store_true", help="only responses that the veto takes tokens out of")
    rollouts.add_argument(
        "--policy", type=Path, metavar="DIR", help="Hugging Face checkpoint that the veto compares with; RUN_DIR/hf"
    )
    rollouts.add_argument("--limit", type=int, default=20, metavar="N", help="at most this many responses")
    _takes_overrides(rollouts)
    rollouts.set_defaults(command=_rollouts)

    report = commands.add_parser("report", help="write report.html of a run directory")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(command=_report)

    doctor = commands.add_parser("doctor", help="what this machine has, what it is used for, what is missing")
    doctor.set_defaults(command=_doctor)
    return parser


def _takes_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="TOML file; the bundled ones are in run_scripts/recipes/")
    _takes_overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, check it, and stop")


def _takes_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key"
    )


# Megatron and SGLang take seconds to import, so each command imports what it needs, after all that needs neither.


def _with_recipe(options: argparse.Namespace, run: Callable[[Recipe], object]) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    if options.dry_run:
        from mugrpo_megatron.run.preflight import check_on_paper

        print(dump_recipe(recipe), end="", flush=True)
        check_on_paper(recipe, lambda line: print(f"mugrpo: {line}", file=sys.stderr))
        return 0
    _say(f"mugrpo {__version__}: {options.recipe} -> {recipe.run.dir}")
    run(recipe)
    return 0


def _train(options: argparse.Namespace) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.directory import is_finished
        from mugrpo_megatron.run.preflight import check_run

        found = None if is_finished(recipe) else check_run(recipe, _say)
        _say(IMPORTING)
        from mugrpo_megatron.train import train

        train(recipe, found)

    return _with_recipe(options, run)


def _generate(options: argparse.Namespace) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.preflight import check_run

        found = check_run(recipe, _say)
        _say(IMPORTING)
        from mugrpo_megatron.commands.separate import generate_alone

        generate_alone(recipe, options.stage, found)

    return _with_recipe(options, run)


def _optimize(options: argparse.Namespace) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.preflight import check_run

        check_run(recipe, _say, generates=False)
        _say(IMPORTING)
        from mugrpo_megatron.commands.separate import optimize_alone

        optimize_alone(recipe, options.stage, options.source)

    return _with_recipe(options, run)


def _sft(options: argparse.Namespace) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.preflight import check_warm_start

        check_warm_start(recipe)
        _say(IMPORTING)
        from mugrpo_megatron.commands.sft import train

        train(recipe)

    return _with_recipe(options, run)


def _say(line: str) -> None:
    """Print a line at once, on the first rank alone."""
    if rank_of_environment() == 0:
        print(line, flush=True)


def _eval(options: argparse.Namespace) -> int:
    from mugrpo_megatron.commands.eval import run

    chosen = [
        f"model.path={options.model}",
        *(
            f"eval.{key}={value}"
            for key, value in (("samples", options.samples), ("temperature", options.temperature))
            if value is not None
        ),
        *options.overrides,
    ]
    run(load_recipe(options.recipe, chosen), options.data, options.out or options.model / "eval")
    return 0


def _score(options: argparse.Namespace) -> int:
    from mugrpo_megatron.commands.score import run

    section = load_recipe(None, options.overrides).reward
    print(run(options.input, options.out, section, strict=not options.skip_malformed))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from mugrpo_megatron.plan.plan import make_plan
    from mugrpo_megatron.plan.printing import print_json, print_plan

    recipe = load_recipe(options.recipe, options.overrides)
    cluster = options.nodes, options.gpus_per_node, options.gpu
    plan = make_plan(recipe, *cluster, options.model_config, options.assume)
    (print_json if options.json else print_plan)(plan)
    return 0


def _rollouts(options: argparse.Namespace) -> int:
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


def _report(options: argparse.Namespace) -> int:
    from mugrpo_megatron.report.report import write_report

    print(write_report(options.run_dir))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from mugrpo_megatron.commands.doctor import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
