"""The arguments of `mugrpo plan`."""

from __future__ import annotations

from pathlib import Path

from mugrpo_megatron.commands.common import Options, Parser, override_arguments, recipe_argument
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import load_recipe


def plan_arguments(parser: Parser) -> None:
    """Add the arguments of `mugrpo plan`: a recipe, the cluster, and what to print."""
    recipe_argument(parser)
    override_arguments(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of machines; 1 by default")
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="N",
        help="number of GPUs of each machine, or of its processes with --gpu cpu; 8 by default",
    )
    parser.add_argument(
        "--gpu", default="h200", help="kind of GPU: h200, h100, a100, b200, rtx4090 or cpu; h200 by default"
    )
    parser.add_argument(
        "--model-config", type=Path, help="config.json to take if the model itself is not on this machine"
    )
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace the value of an assumed rate or length",
    )
    parser.add_argument(
        "--schedules",
        action="store_true",
        help="print only how many hours the same updates take in stages of 1, 2, 4, ... updates",
    )
    parser.add_argument(
        "--pilot",
        type=Path,
        metavar="RUN",
        help="a finished run with GRPO's schedule and a constant learning rate; with --schedules the plan says by "
        "how many points each schedule may trail GRPO after equal updates and be level with it after equal time",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")


def plan(options: Options) -> int:
    """Print the plan of the recipe on the cluster, or its hours under other schedules."""
    from mugrpo_megatron.extras.plan.plan import make_plan
    from mugrpo_megatron.extras.plan.printing import launch_commands, print_json, print_plan
    from mugrpo_megatron.extras.plan.printing_schedules import print_schedules, read_pilot

    recipe = load_recipe(options.recipe, options.overrides)
    cluster = options.nodes, options.gpus_per_node, options.gpu
    if options.pilot and not options.schedules:
        raise UserError("--pilot needs --schedules; add that option")
    pilot = read_pilot(options.pilot) if options.pilot else None
    plan = make_plan(recipe, *cluster, options.model_config, options.assume, options.schedules)
    launch = launch_commands(options.recipe, options.overrides, plan.cluster)
    if options.json:
        print_json(plan, launch, pilot)
    elif options.schedules:
        print_schedules(plan, pilot)
    else:
        print_plan(plan, launch)
    return 0
