"""`mugrpo publish` and `mugrpo import`: their arguments."""

from __future__ import annotations

import shlex
from pathlib import Path

from mugrpo_megatron.commands.common import Options, Parser, override_arguments, say
from mugrpo_megatron.recipe import load_recipe


def publish_stage_arguments(parser: Parser) -> None:
    """Add the arguments of `mugrpo publish`: a run's stage, and the directory of the data set."""
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument(
        "--stage", type=int, required=True, metavar="K", help="number of the stage, from 0; it has to be sealed"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory to write, the data set")
    parser.add_argument("--overwrite", action="store_true", help="replace a published stage that is in DIR")
    parser.add_argument("--weights", action="store_true", help="publish the checkpoint that sampled the stage too")
    parser.add_argument(
        "--hub", metavar="NAME", help="upload the data set to the Hugging Face hub under this name, as a private one"
    )
    parser.add_argument("--public", action="store_true", help="with --hub: upload it as a public data set")


def publish_stage(options: Options) -> int:
    from mugrpo_megatron.extras.exchange.publish import publish, upload

    publish(options.run_dir, options.stage, options.to, options.weights, options.overwrite)
    if options.hub:
        upload(options.to, options.hub, options.public)
    return 0


def import_stage_arguments(parser: Parser) -> None:
    """Add the arguments of `mugrpo import`: another program's responses, and the recipe that is to train on them."""
    parser.add_argument(
        "file", type=Path, help="file with one response a row: JSON lines, Parquet, a JSON array or CSV"
    )
    parser.add_argument(
        "--recipe", type=Path, required=True, help="recipe of the run that is to train on the responses"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory to write, the stage")
    parser.add_argument(
        "--reward",
        metavar="COLUMN",
        help="column with the rewards; by default `reward`, and without that column the reward function scores "
        "the rows",
    )
    override_arguments(parser)


def import_stage(options: Options) -> int:
    from mugrpo_megatron.data.files import check_file

    recipe = load_recipe(options.recipe, options.overrides)
    check_file(options.file)
    from mugrpo_megatron.extras.exchange.import_rollouts import import_rollouts

    import_rollouts(options.file, recipe, options.to, options.reward)
    sets = [word for setting in [*options.overrides, "run.dir=NEW"] for word in ("--set", setting)]
    say(f"train on them: {shlex.join(['mugrpo', 'optimize', str(options.recipe), '--from', str(options.to), *sets])}")
    return 0
