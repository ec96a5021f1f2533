"""The commands that look at runs: `rollouts`, `publish`, `import`, `report`."""

from __future__ import annotations

from pathlib import Path

from mugrpo_megatron.commands.command import Command, Options, Parser, takes_overrides
from mugrpo_megatron.recipe import load_recipe


def _takes_rollouts(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--stage", type=int, metavar="K", help="from 0; the newest sealed one otherwise")
    parser.add_argument("--update", type=int, metavar="N", help="only the responses of this update of the stage")
    parser.add_argument("--group", type=int, metavar="N", help="one group in full, its triggers marked")
    parser.add_argument(
        "--grep", metavar="REGEX", help="only where prompt, response, gold, answer, reason or a value of the row has it"
    )
    rightness = parser.add_mutually_exclusive_group()
    rightness.add_argument("--right", action="store_const", const=True, help="only rewards of at least 0.5")
    rightness.add_argument("--wrong", action="store_const", const=False, dest="right", help="only rewards below 0.5")
    parser.add_argument("--min-reward", type=float, metavar="R")
    parser.add_argument("--max-reward", type=float, metavar="R")
    parser.add_argument("--advantage", choices=["positive", "negative", "zero"])
    parser.add_argument("--vetoed", action="store_true", help="only responses that the veto takes tokens out of")
    parser.add_argument(
        "--policy", type=Path, metavar="DIR", help="Hugging Face checkpoint that the veto compares with; RUN_DIR/hf"
    )
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="at most this many responses; 20 by default")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with everything that is known")
    takes_overrides(parser)


def _rollouts(options: Options) -> int:
    from mugrpo_megatron.commands.rollouts import Selection, browse

    selection = Selection(
        update=options.update,
        group=options.group,
        min_reward=options.min_reward,
        max_reward=options.max_reward,
        right=options.right,
        grep=options.grep,
        advantage=options.advantage,
        vetoed=options.vetoed,
        limit=options.limit,
    )
    browse(options.run_dir, options.stage, selection, options.policy, options.overrides, options.json)
    return 0


def _takes_publish(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--stage", type=int, required=True, metavar="K", help="from 0; it has to be sealed")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory of the data set")
    parser.add_argument("--overwrite", action="store_true", help="replace a published stage in DIR")
    parser.add_argument("--weights", action="store_true", help="also the checkpoint that the stage begins with")
    parser.add_argument("--hub", metavar="NAME", help="upload it as this data set of the Hugging Face hub, private")
    parser.add_argument("--public", action="store_true", help="with --hub: for everybody to see")


def _publish(options: Options) -> int:
    from mugrpo_megatron.extras.exchange.publish import publish, upload

    publish(options.run_dir, options.stage, options.to, options.weights, options.overwrite)
    if options.hub:
        upload(options.to, options.hub, options.public)
    return 0


def _takes_import(parser: Parser) -> None:
    parser.add_argument("file", type=Path, help="JSON lines, Parquet, a JSON array or CSV: one response a row")
    parser.add_argument("--recipe", type=Path, required=True, help="of the run that is to train on them")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory of the stage")
    parser.add_argument("--reward", metavar="COLUMN", help="the rows' rewards; `reward`, or the verifier's, otherwise")
    takes_overrides(parser)


def _import(options: Options) -> int:
    from mugrpo_megatron.data.files import check_file

    recipe = load_recipe(options.recipe, options.overrides)
    check_file(options.file)
    from mugrpo_megatron.extras.exchange.import_rollouts import import_rollouts

    import_rollouts(options.file, recipe, options.to, options.reward)
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


ROLLOUTS = Command(
    "rollouts", "show and search a stage's responses, and what the veto takes out of them", _takes_rollouts, _rollouts
)
PUBLISH = Command("publish", "a stage as a data set that trains again, with a card", _takes_publish, _publish)
IMPORT = Command("import", "rollouts of another program as a stage to train on", _takes_import, _import)
REPORT = Command("report", "a page about a run, or about several; live while a run goes on", _takes_report, _report)
