"""The commands that measure and plan: `eval`, `score`, `plan`, `doctor`."""

from __future__ import annotations

import json
from pathlib import Path

from mugrpo_megatron.commands.command import Command, Options, Parser, say, takes_overrides
from mugrpo_megatron.files.hub import model_name
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.record import MARK


def _takes_eval(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="Hugging Face checkpoint directory, or OWNER/NAME on the hub")
    parser.add_argument("--data", nargs="+", required=True, metavar="SET", help="files, bundled tasks or preset names")
    parser.add_argument("--samples", type=int, metavar="K", help="responses to each problem: eval.samples")
    parser.add_argument("--temperature", type=float, help="eval.temperature; 0 is greedy")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where results go; by default MODEL/eval, RUN_DIR/eval for a run's hf/, runs/eval/NAME for a model of the "
        "hub; the same directory continues an evaluation",
    )
    parser.add_argument(
        "--recipe", type=Path, help="take every other setting from this recipe, what it says of single sets too"
    )
    takes_overrides(parser)


def _eval(options: Options) -> int:
    from mugrpo_megatron.run.preflight import check_evaluation

    chosen = [
        f"model.path={json.dumps(str(options.model), ensure_ascii=False)}",  # a directory may be called 7 or true
        *(
            f"eval.{key}={value}"
            for key, value in (("samples", options.samples), ("temperature", options.temperature))
            if value is not None
        ),
        *options.overrides,
    ]
    out = options.out or results_of(options.model)
    recipe = load_recipe(options.recipe, chosen)
    check_evaluation(recipe, options.data)
    from mugrpo_megatron.commands.eval import run

    run(recipe, options.data, out)
    say(visible(f"results: {out}"))
    return 0


def results_of(model: Path) -> Path:
    """Where the results of a model go: next to its weights, those of a model of the hub under `runs`.

    A run replaces its `hf/`, so results of these weights go into the run's directory.
    """
    if model_name(model) is not None:
        return Path("runs/eval") / model.name
    return (model.resolve().parent if (model / MARK).exists() else model) / "eval"


def _takes_score(parser: Parser) -> None:
    parser.add_argument("input", type=Path, help="JSON lines, Parquet, a JSON array or CSV")
    parser.add_argument("--out", type=Path, required=True, help="the same rows in the same order, with their scores")
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it exists; never the input")
    parser.add_argument("--skip-malformed", action="store_true", help="count malformed rows instead of stopping at one")
    takes_overrides(parser)


def _score(options: Options) -> int:
    from mugrpo_megatron.commands.score import run

    section = load_recipe(None, options.overrides).reward
    print(run(options.input, options.out, section, strict=not options.skip_malformed, overwrite=options.overwrite))
    return 0


def _takes_plan(parser: Parser) -> None:
    parser.add_argument("recipe", type=Path, help="TOML file; the bundled ones are in run_scripts/recipes/")
    takes_overrides(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines of the cluster; 1 by default")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="with --gpu cpu: ranks on each node; 8 by default"
    )
    parser.add_argument("--gpu", default="h200", help="h200, h100, a100, b200, rtx4090 or cpu; h200 by default")
    parser.add_argument("--model-config", type=Path, help="config.json of a model that is not on this machine")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="replace an assumed rate")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")


def _plan(options: Options) -> int:
    from mugrpo_megatron.extras.plan.plan import make_plan
    from mugrpo_megatron.extras.plan.printing import launch_commands, print_json, print_plan

    recipe = load_recipe(options.recipe, options.overrides)
    cluster = options.nodes, options.gpus_per_node, options.gpu
    plan = make_plan(recipe, *cluster, options.model_config, options.assume)
    launch = launch_commands(options.recipe, options.overrides, plan.cluster)
    (print_json if options.json else print_plan)(plan, launch)
    return 0


def _doctor(options: Options) -> int:
    from mugrpo_megatron.commands.doctor import doctor

    return doctor()


EVAL = Command(
    "eval",
    "accuracy of a checkpoint on data sets: mean@k, pass@k, majority@k",
    _takes_eval,
    _eval,
    "the same command continues the evaluation",
    long=True,
)
SCORE = Command("score", "score a file of responses: rows {response, answer} gain a reward", _takes_score, _score)
PLAN = Command("plan", "memory, time and layouts of a run on any cluster, on paper", _takes_plan, _plan)
DOCTOR = Command("doctor", "what this machine has, what it is used for, what is missing", lambda parser: None, _doctor)
