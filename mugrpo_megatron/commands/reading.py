"""Arguments and entry points of the commands `mugrpo eval`, `score`, `rollouts`, `report` and `convert`."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from importlib import import_module
from pathlib import Path

from mugrpo_megatron.commands.common import Options, Parser, override_arguments, say, with_dtype
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import CONFIG
from mugrpo_megatron.files.hub import model_name
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.terminal import visible


def evaluate_arguments(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="a run, a Hugging Face checkpoint, or OWNER/NAME on the hub")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="SET",
        help="problems to evaluate on: files, bundled tasks or named data sets",
    )
    parser.add_argument(
        "--samples", type=int, metavar="K", help="number of responses to each problem; by default eval.samples"
    )
    parser.add_argument(
        "--temperature", type=float, help="sampling temperature, where 0 is greedy; by default eval.temperature"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory of the results; by default MODEL/eval, RUN_DIR/eval for a run, and runs/eval/NAME for a "
        "model of the hub; "
        "the same directory continues an evaluation",
    )
    parser.add_argument(
        "--recipe", type=Path, help="take all other settings from this recipe, including those of single sets"
    )
    override_arguments(parser)


def evaluate(options: Options) -> int:
    from mugrpo_megatron.checks.preflight import check_evaluation

    model = weights_of(options.model)
    settings = {"eval.samples": options.samples, "eval.temperature": options.temperature}
    overrides = [
        f"model.path={json.dumps(str(model), ensure_ascii=False)}",  # quoted, since a directory may be called 7 or true
        *(f"{key}={value}" for key, value in settings.items() if value is not None),
        *options.overrides,
    ]
    out = options.out or results_of(model)
    recipe = load_recipe(options.recipe, overrides)
    recipe = recipe.model_copy(update={"model": with_dtype(recipe.model, say)})
    check_evaluation(recipe, options.data)
    from mugrpo_megatron.commands.eval import run

    run(recipe, options.data, out)
    say(visible(f"results: {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out}"))
    return 0


def weights_of(model: Path) -> Path:
    """Returns the directory with the weights: `hf/` in `model` if that is the directory of a run or of `mugrpo sft`,
    else `model` itself. UserError if a run has no hf/ yet."""
    trained = model / "hf"
    if (model / CONFIG).exists():
        return model
    if (trained / CONFIG).is_file():
        return trained
    if (model / "run.json").exists():
        raise UserError(
            f"{model}: this run has no hf/ yet; wait until the run has finished, or has ended a stage with a "
            "checkpoint (checkpoint.every_stages)"
        )
    return model


def results_of(model: Path) -> Path:
    """Returns the directory for a model's results: `eval` beside a run's hf/, `eval` inside another checkpoint, and
    runs/eval/NAME for a model of the hub."""
    # Not inside a run's hf/, since the run replaces that directory.
    from mugrpo_megatron.run.record import PROVENANCE

    if model_name(model) is not None:
        return Path("runs/eval") / model.name
    return (model.resolve().parent if (model / PROVENANCE).exists() else model) / "eval"


FEWEST_ROWS = 16
"""A file with fewer rows than this is judged as if it had this many: with `reward.max_failure_share = 0.1` it may then
have one failed row. Training judges its first responses in the same way (`rewards.calls`)."""


def score_arguments(parser: Parser) -> None:
    """Add the arguments of `mugrpo score`: a file of responses and its output."""
    parser.add_argument("input", type=Path, help="file of responses: JSON lines, Parquet, a JSON array or CSV")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write: the same rows in the same order, with scores"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file --out if it exists; the input is never replaced"
    )
    parser.add_argument(
        "--skip-malformed",
        action="store_true",
        help="leave out and count malformed rows instead of stopping at the first",
    )
    override_arguments(parser)


def score(options: Options) -> int:
    from mugrpo_megatron.commands.score import opening_of_prompts, run

    recipe = load_recipe(None, options.overrides)
    opening = opening_of_prompts(recipe)
    strict = not options.skip_malformed
    summary = run(options.input, options.out, recipe.reward, strict, options.overwrite, opening)
    print(summary)
    if summary.failed > recipe.reward.max_failure_share * max(FEWEST_ROWS, summary.rows):
        raise UserError(
            f"the reward failed on {summary.failed:,} of {summary.rows:,} rows, which count 0; the column why of "
            f"{options.out} has each exception; fix the function, or raise reward.max_failure_share"
        )
    return 0


def rollouts_arguments(parser: Parser) -> None:
    """Add the arguments of `mugrpo rollouts`: a run, and conditions that its responses must meet to be shown."""
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument(
        "--stage", type=int, metavar="K", help="number of the stage, from 0; by default the newest sealed one"
    )
    parser.add_argument(
        "--by", choices=["problem"], help="print a line for each problem: its pass rate, tokens and cut responses"
    )
    parser.add_argument("--update", type=int, metavar="N", help="show only the responses of update N of the stage")
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="print the whole responses of group N, with marked triggers if a policy is given",
    )
    parser.add_argument(
        "--grep",
        metavar="REGEX",
        help="show only responses where REGEX is in the prompt, response, gold, answer, reason or a value of the row",
    )
    rightness = parser.add_mutually_exclusive_group()
    rightness.add_argument(
        "--right",
        action="store_const",
        const=True,
        help="show only responses with a reward of at least 0.5 before penalties",
    )
    rightness.add_argument(
        "--wrong",
        action="store_const",
        const=False,
        dest="right",
        help="show only responses with a reward below 0.5 before penalties",
    )
    parser.add_argument("--min-reward", type=float, metavar="R", help="show only responses with a reward of at least R")
    parser.add_argument("--max-reward", type=float, metavar="R", help="show only responses with a reward of at most R")
    parser.add_argument(
        "--advantage",
        choices=["positive", "negative", "zero"],
        help="show only responses whose advantage has this sign",
    )
    parser.add_argument("--vetoed", action="store_true", help="show only responses from which the veto drops tokens")
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="DIR",
        help="Hugging Face checkpoint under which the veto looks for triggers; by default RUN_DIR/hf",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=20,
        metavar="N",
        help="print at most N responses or N lines of a table; by default 20. `--by problem --json` prints every "
        "problem",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print each response as a JSON object in a line, with everything that is known about it",
    )
    override_arguments(parser)


def rollouts(options: Options) -> int:
    """Show responses of a stage."""
    from mugrpo_megatron.commands.rollouts import RolloutFilter, browse, browse_problems

    conditions = RolloutFilter(**{field.name: getattr(options, field.name) for field in fields(RolloutFilter)})
    if options.by:
        if not conditions.takes_all or options.policy:
            raise UserError(
                "--by problem counts every response of a stage: leave the other conditions out, such as --grep and "
                "--policy"
            )
        browse_problems(options.run_dir, options.stage, options.limit, options.overrides, options.json)
        return 0
    browse(options.run_dir, options.stage, conditions, options.policy, options.overrides, options.json)
    return 0


def report_arguments(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path, nargs="+", help="directory of a run; several runs share one page")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="file to write for several runs")


def report(options: Options) -> int:
    """Write the page of one run or several and print its path."""
    run_dirs, out = options.run_dir, options.out
    if len(run_dirs) == 1:
        if out is not None:
            raise UserError("--out is for a page of several runs; leave it out: one run's page is RUN_DIR/report.html")
        from mugrpo_megatron.report.page import write_report

        print(visible(str(write_report(run_dirs[0]))))
        return 0
    if out is None:
        raise UserError("several runs need --out PAGE.html for their common page")
    from mugrpo_megatron.extras.comparison.comparison import write_comparison

    print(visible(str(write_comparison(run_dirs, out))))
    return 0


CONVERSIONS = ("hf_to_megatron", "megatron_to_hf", "text_of", "verify")


def convert_arguments(parser: Parser) -> None:
    parser.add_argument(
        "conversion", choices=CONVERSIONS, help="`mugrpo convert CONVERSION --help` lists its arguments"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the conversion")


def convert(options: Options) -> int:
    """Run one of the commands in `checkpoints_convert`."""
    return int(import_module(f"checkpoints_convert.{options.conversion}").main(options.arguments))
