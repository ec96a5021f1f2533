"""`mugrpo plan`: its arguments."""

from __future__ import annotations

from pathlib import Path

from mugrpo_megatron.commands.common import Options, Parser, override_arguments, recipe_argument
from mugrpo_megatron.recipe import load_recipe


def plan_arguments(parser: Parser) -> None:
    """A recipe, and the cluster."""
    recipe_argument(parser)
    override_arguments(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines of the cluster; 1 by default")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="with --gpu cpu: ranks on each node; 8 by default"
    )
    parser.add_argument("--gpu", default="h200", help="h200, h100, a100, b200, rtx4090 or cpu; h200 by default")
    parser.add_argument("--model-config", type=Path, help="config.json of a model that is not on this machine")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="replace an assumed rate")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")


def plan(options: Options) -> int:
    """Print the plan of the recipe on the cluster."""
    from mugrpo_megatron.extras.plan.plan import make_plan
    from mugrpo_megatron.extras.plan.printing import launch_commands, print_json, print_plan

    recipe = load_recipe(options.recipe, options.overrides)
    cluster = options.nodes, options.gpus_per_node, options.gpu
    plan = make_plan(recipe, *cluster, options.model_config, options.assume)
    launch = launch_commands(options.recipe, options.overrides, plan.cluster)
    (print_json if options.json else print_plan)(plan, launch)
    return 0
