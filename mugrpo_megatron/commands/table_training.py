"""The commands that train: `train`, `generate`, `seal`, `optimize`, `sweep`, `sft`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from mugrpo_megatron import __version__
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
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.recipe import Recipe


def _train(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.directory import RunDirectory, is_finished

        if is_finished(recipe):
            from mugrpo_megatron.phases.finish import show_finished

            show_finished(RunDirectory(recipe.run.dir))
            return
        from mugrpo_megatron.engine.ahead import host_ahead
        from mugrpo_megatron.run.preflight import check_run

        recipe, problems = check_run(recipe, say)
        with host_ahead(recipe) as warm_host:
            say(IMPORTING)
            from mugrpo_megatron.run.run import open_run
            from mugrpo_megatron.train import train_stages

            with open_run(recipe, problems, warm_host) as opened:
                train_stages(*opened)

    return with_recipe(options, run)


def _takes_stage(parser: Parser) -> None:
    takes_recipe(parser)
    parser.add_argument("--stage", type=int, metavar="K", help="insist that this is the stage, from 0")


def _takes_generate(parser: Parser) -> None:
    _takes_stage(parser)
    parser.add_argument(
        "--engine-only",
        action="store_true",
        help="without a learner: weights from RUN_DIR/hf (model.path at a run's start), no Megatron, no process group",
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="with --engine-only: the I-th of N processes, from 0; `mugrpo seal` closes the stage",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="with --engine-only: with schedule.max_sample_age, every stage ahead of the learner, until the run's last",
    )


def _generate(options: Options) -> int:
    if options.engine_only:
        return _generate_share(options)
    if options.shard or options.follow:
        raise UserError(f"{'--shard' if options.shard else '--follow'} goes with --engine-only")

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.engine.ahead import host_ahead
        from mugrpo_megatron.run.preflight import check_run

        recipe, problems = check_run(recipe, say)
        with host_ahead(recipe) as warm_host:
            say(IMPORTING)
            from mugrpo_megatron.commands.separate import generate_alone

            generate_alone(recipe, options.stage, problems, warm_host)

    return with_recipe(options, run)


def _generate_share(options: Options) -> int:
    share = import_module("mugrpo_megatron.extras.prefetch.shares").parse_share(options.shard or "0/1")
    if options.follow and options.stage is not None:
        raise UserError("--follow takes the stages as the learner comes to them; omit --stage")

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.preflight import check_engine_only

        if options.follow and not recipe.schedule.max_sample_age:
            raise UserError(
                "--follow generates stages that a learner accepts ahead: set schedule.max_sample_age, or leave out "
                "--follow"
            )
        recipe, problems = check_engine_only(recipe, say)
        engine_only = import_module("mugrpo_megatron.extras.prefetch.engine_only")
        if options.follow:
            stages = engine_only.follow(recipe, share, problems)
            say(f"share {share}: the run has no further stage; {stages} were generated ahead")
            return
        groups = engine_only.generate_share(recipe, share, options.stage, problems)
        say(f"share {share} has all of its {groups:,} groups; once all shares have, `mugrpo seal {recipe.run.dir}`")

    return with_recipe(options, run)


def _takes_seal(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path)


def _seal(options: Options) -> int:
    sealing = import_module("mugrpo_megatron.extras.prefetch.sealing")
    say(visible(sealing.seal(options.run_dir)))
    return 0


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
        from mugrpo_megatron.run.branch import stage_to_take
        from mugrpo_megatron.run.preflight import check_run

        stage = stage_to_take(options.source, options.stage) if options.source else options.stage
        recipe, _ = check_run(recipe, say, generates=False)
        say(IMPORTING)
        from mugrpo_megatron.commands.separate import optimize_alone

        optimize_alone(recipe, stage, options.source)

    return with_recipe(options, run)


def _takes_sweep(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run that has generated the stage")
    parser.add_argument("--stage", type=int, default=0, metavar="K", help="the sealed stage, from 0")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE,VALUE",
        help="an axis of the grid; with one value, a setting of every cell",
    )
    parser.add_argument("--grid", type=Path, metavar="FILE", help="TOML file with [set], [axes] and [[cells]]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the cells go; RUN_DIR-sweep-stageK")
    parser.add_argument("--dry-run", action="store_true", help="check all cells, print their states, and stop")


def _sweep(options: Options) -> int:
    from mugrpo_megatron.extras.sweep.cells import Sweep, check_sweep, default_out, states
    from mugrpo_megatron.extras.sweep.grid import cells_of, read_grid
    from mugrpo_megatron.run.directory import RunDirectory
    from mugrpo_megatron.run.preflight import check_run

    source, stage = options.run_dir, options.stage
    out = options.out or default_out(source, stage)
    sweep = Sweep(source, stage, out, cells_of(read_grid(options.overrides, options.grid), RunDirectory(source), out))
    sweep, origin = check_sweep(sweep)
    if options.dry_run:
        print(visible(states(sweep)))
        return 0
    say(visible(f"mugrpo {__version__}: {len(sweep.cells)} cells on stage {stage} of {source} -> {out}"))
    _, found = check_run(sweep.cells[0].recipe, say)
    say(IMPORTING)
    from mugrpo_megatron.extras.sweep.sweep import run_sweep

    return run_sweep(sweep, origin, found)


def _sft(options: Options) -> int:
    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.commands.sft import is_warm_started
        from mugrpo_megatron.run.preflight import check_warm_start

        is_warm_started(recipe)
        recipe = check_warm_start(recipe, say)
        say(IMPORTING)
        from mugrpo_megatron.commands.sft import train

        train(recipe)

    return with_recipe(options, run, lambda recipe: recipe.sft.output)


TRAIN = Command(
    "train",
    "stages of generate -> optimize, from a recipe",
    takes_recipe,
    _train,
    CONTINUES,
    long=True,
    stops=True,
)
GENERATE = Command(
    "generate",
    "only generate, score and seal the stage at which a run stands",
    _takes_generate,
    _generate,
    CONTINUES,
    long=True,
    stops=True,
)
SEAL = Command("seal", "close a stage that `generate --engine-only` processes have generated", _takes_seal, _seal)
OPTIMIZE = Command(
    "optimize",
    "only take the updates of a sealed stage, without an engine",
    _takes_optimize,
    _optimize,
    CONTINUES,
    long=True,
    stops=True,
)
SWEEP = Command(
    "sweep",
    "objectives, rates, thresholds and scopes compared on one sealed stage",
    _takes_sweep,
    _sweep,
    "the same command continues the sweep",
    long=True,
    stops=True,
)
SFT = Command(
    "sft", "supervised learning: a model on your rows, or a new one as a warm start", takes_recipe, _sft, long=True
)
