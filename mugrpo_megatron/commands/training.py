"""`mugrpo train`, `generate`, `seal`, `optimize` and `sft`: what each takes, checks and imports, in this order."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from mugrpo_megatron.commands.common import IMPORTING, Options, Parser, recipe_arguments, say, with_recipe
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.recipe import Recipe

train_arguments = sft_arguments = recipe_arguments


def train(options: Options) -> int:
    """Train, or show what a finished run has."""

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.directory import RunDirectory, is_finished

        if is_finished(recipe):
            from mugrpo_megatron.phases.finish import show_finished

            show_finished(RunDirectory(recipe.run.dir))
            return
        from mugrpo_megatron.checks.preflight import check_run
        from mugrpo_megatron.engine.launch import host_ahead

        recipe, problems = check_run(recipe, say)
        with host_ahead(recipe) as warm_host:
            say(IMPORTING)
            from mugrpo_megatron.run.run import open_run
            from mugrpo_megatron.train import train_stages

            with open_run(recipe, problems, warm_host) as opened:
                train_stages(*opened)

    return with_recipe(options, run)


def _stage_arguments(parser: Parser) -> None:
    recipe_arguments(parser)
    parser.add_argument("--stage", type=int, metavar="K", help="insist that this is the stage, from 0")


def generate_arguments(parser: Parser) -> None:
    """A recipe, and how processes without a learner share a stage."""
    _stage_arguments(parser)
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


def generate(options: Options) -> int:
    """Generate the stage at which the run stands, with the learner's ranks or by engines alone."""
    if options.engine_only:
        return _generate_share(options)
    if options.shard or options.follow:
        raise UserError(f"{'--shard' if options.shard else '--follow'} goes with --engine-only")

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.checks.preflight import check_run
        from mugrpo_megatron.engine.launch import host_ahead

        recipe, problems = check_run(recipe, say)
        with host_ahead(recipe) as warm_host:
            say(IMPORTING)
            from mugrpo_megatron.commands.separate import generate_alone

            generate_alone(recipe, options.stage, problems, warm_host)

    return with_recipe(options, run)


def _generate_share(options: Options) -> int:
    share = import_module("mugrpo_megatron.extras.prefetch.shares").parse_share(options.shard or "0/1")
    if options.follow and options.stage is not None:
        raise UserError("--follow generates the stages in their order; omit --stage")

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.checks.preflight import check_engine_only

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
        say(visible(engine_only.generate_share(recipe, share, options.stage, problems)))

    return with_recipe(options, run)


def seal_arguments(parser: Parser) -> None:
    """A run's directory."""
    parser.add_argument("run_dir", type=Path)


def seal(options: Options) -> int:
    """Close the stage at which the run stands."""
    shares = import_module("mugrpo_megatron.extras.prefetch.shares")
    say(visible(shares.seal(options.run_dir)))
    return 0


def optimize_arguments(parser: Parser) -> None:
    """A recipe, and the run whose stage is taken over."""
    _stage_arguments(parser)
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="take stage K of this run, or a published stage, into a new run.dir: the same responses and weights",
    )


def optimize(options: Options) -> int:
    """Take the updates of a sealed stage."""

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.checks.preflight import check_run
        from mugrpo_megatron.run.branch import stage_to_take

        stage = stage_to_take(options.source, options.stage) if options.source else options.stage
        recipe, _ = check_run(recipe, say, generates=False)
        say(IMPORTING)
        from mugrpo_megatron.commands.separate import optimize_alone

        optimize_alone(recipe, stage, options.source)

    return with_recipe(options, run)


def sft(options: Options) -> int:
    """Train a model on rows, or a new one on a bundled task."""

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.checks.preflight import check_warm_start
        from mugrpo_megatron.commands.warm_start import is_warm_started

        is_warm_started(recipe)
        recipe = check_warm_start(recipe, say)
        say(IMPORTING)
        from mugrpo_megatron.commands.sft import train

        train(recipe)

    return with_recipe(options, run, lambda recipe: recipe.sft.output)
