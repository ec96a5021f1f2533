"""`mugrpo train`, `generate`, `seal`, `optimize` and `sft`: for each its arguments, checks and imports, in this order.

`generate_alone` and `optimize_alone` are the two phases of a stage, which two commands can run one after the other on
one run directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mugrpo_megatron.commands.common import IMPORTING, Options, Parser, recipe_arguments, say, with_recipe
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.environment import rank_of_environment
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.terminal import visible

if TYPE_CHECKING:
    from mugrpo_megatron.data.prepare import Problems
    from mugrpo_megatron.engine.process import HostProcess

sft_arguments = recipe_arguments


def train_arguments(parser: Parser) -> None:
    recipe_arguments(parser)
    _server_arguments(parser)


def _server_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--server",
        dest="servers",
        action="append",
        default=[],
        metavar="URL",
        help="address of a vLLM or SGLang server that generates instead of an engine, or @FILE with one address a "
        "line; may be repeated",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="S",
        help="with --server: seconds after which a request for one group of responses is given up",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=3600.0,
        metavar="S",
        help="with --server: seconds without any usable server after which the command ends",
    )


def train(options: Options) -> int:
    """Train the run of a recipe; for a finished run, show its results."""

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.run.directory import RunDirectory, is_finished

        if is_finished(recipe):
            from mugrpo_megatron.phases.saves import show_finished

            show_finished(RunDirectory(recipe.run.dir))
            return
        if options.servers:
            _train_with_servers(recipe, options)
            return
        from mugrpo_megatron.checks.preflight import check_run
        from mugrpo_megatron.engine.launch import prelaunch_host

        recipe, problems = check_run(recipe, say)
        with prelaunch_host(recipe.engine, recipe.model.directory) as host:
            say(IMPORTING)
            from mugrpo_megatron.train import train

            train(recipe, problems, host)

    return with_recipe(options, run)


def _train_with_servers(recipe: Recipe, options: Options) -> None:
    from mugrpo_megatron.checks.preflight import check_run, read_checked_problems
    from mugrpo_megatron.extras.servers.options import check_servers, server_options

    servers = server_options(options.servers, options.timeout, options.patience)
    check_servers(recipe)
    recipe, _ = check_run(recipe, say, generates=False)
    problems = read_checked_problems(recipe, say)
    say(IMPORTING)
    from mugrpo_megatron.extras.servers.training import train_with_servers

    train_with_servers(recipe, problems, servers)


def _stage_arguments(parser: Parser) -> None:
    recipe_arguments(parser)
    parser.add_argument(
        "--stage", type=int, metavar="K", help="end with an error unless the run stands at stage K, from 0"
    )


def generate_arguments(parser: Parser) -> None:
    """Add the arguments of `mugrpo generate`: a recipe, and options for generation without a learner."""
    _stage_arguments(parser)
    parser.add_argument(
        "--engine-only",
        action="store_true",
        help="generate without a learner: take the weights of RUN_DIR/hf, or of model.path at a run's start; "
        "needs no Megatron and no process group",
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="with --engine-only or --server: be the I-th of N processes, from 0, that share the stage; `mugrpo "
        "seal` then closes it",
    )
    _server_arguments(parser)


def generate(options: Options) -> int:
    """Generate the run's current stage: with the learner's ranks, by engines alone, or by servers."""
    if options.servers and options.engine_only:
        raise UserError("--server and --engine-only exclude each other: pass one of them")
    if options.engine_only or options.servers:
        return _generate_shard(options)
    if options.shard:
        raise UserError("--shard goes with --engine-only or --server: pass one of them too")

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.checks.preflight import check_run
        from mugrpo_megatron.engine.launch import prelaunch_host

        recipe, problems = check_run(recipe, say)
        with prelaunch_host(recipe.engine, recipe.model.directory) as host:
            say(IMPORTING)
            generate_alone(recipe, options.stage, problems, host)

    return with_recipe(options, run)


def generate_alone(
    recipe: Recipe, stage: int | None, problems: Problems | None, host: HostProcess | None = None
) -> None:
    """Generate, score and seal the run's current stage, unless it is sealed; then run the auxiliary models on it.

    Every rank runs this.

    `recipe` and `problems` are what `checks.preflight.check_run` returned. `host` is an engine's host process that was
    started ahead (`prelaunch_host`), if one was.
    Raises UserError when `stage` is given and is not the current one, or when the run has taken all of its updates.
    """
    from mugrpo_megatron.run.opening import open_run
    from mugrpo_megatron.train import generate_stage

    if _sealed(recipe, _current_stage(recipe, stage)) and not recipe.auxiliary.by_name:
        say("the stage is sealed already; `mugrpo optimize` takes its updates")
        return
    with open_run(recipe, problems, host) as (run, learner, engines, cursor):
        generate_stage(run, learner, engines, cursor)
    say(f"{run.directory.stage(cursor.stage)} is sealed; `mugrpo optimize` takes its updates")


def _generate_shard(options: Options) -> int:
    from mugrpo_megatron.extras.engine_only.shards import parse_shard

    shard = parse_shard(options.shard or "0/1")

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.checks.preflight import check_engine_only

        if options.servers:
            from mugrpo_megatron.extras.servers.options import check_servers, server_options

            servers = server_options(options.servers, options.timeout, options.patience)
            check_servers(recipe)
            recipe, problems = check_engine_only(recipe, say, engine=False)
            from mugrpo_megatron.extras.servers.filling import fill_shard

            say(visible(fill_shard(recipe, shard, options.stage, problems, servers)))
            return
        recipe, problems = check_engine_only(recipe, say)
        # Not at the top: it imports torch, and the checks should come first.
        from mugrpo_megatron.extras.engine_only.shard_generation import generate_shard

        say(visible(generate_shard(recipe, shard, options.stage, problems)))

    return with_recipe(options, run)


def seal_arguments(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path, help="directory of the run")


def seal(options: Options) -> int:
    """Seal the run's current stage: mark it complete, so that it does not change again."""
    from mugrpo_megatron.extras.engine_only import shards

    say(visible(shards.seal(options.run_dir)))
    return 0


def optimize_arguments(parser: Parser) -> None:
    """Add the arguments of `mugrpo optimize`: a recipe, and another run whose stage is trained on."""
    _stage_arguments(parser)
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="begin a new run.dir with stage K of this run, or with a published stage: the same responses and weights",
    )


def optimize(options: Options) -> int:
    """Take the updates of a sealed stage, without generating."""

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.checks.preflight import check_run
        from mugrpo_megatron.run.branch import branch_stage

        stage = branch_stage(options.source, options.stage) if options.source else options.stage
        recipe, _ = check_run(recipe, say, generates=False)
        say(IMPORTING)
        optimize_alone(recipe, stage, options.source)

    return with_recipe(options, run)


def optimize_alone(recipe: Recipe, stage: int | None, source: Path | None = None) -> None:
    """Take the updates of a sealed stage without an engine, and write the policy to `hf/`. Every rank runs this.

    Without an engine nothing can be evaluated between the updates, so `eval.every_updates` is ignored.

    With `source`, another run's directory or a published stage, `run.dir` first becomes a branch of it at the start of
    `stage` (`branch_stage`): the same responses and weights, with the recipe's own objective and optimizer. Raises
    UserError when `stage` is given and is not the current one, when the stage is not sealed, or when the run has taken
    all of its updates.
    """
    from mugrpo_megatron.phases.saves import export
    from mugrpo_megatron.run.branch import branch
    from mugrpo_megatron.run.opening import open_run
    from mugrpo_megatron.train import optimize_stage

    if rank_of_environment() == 0:  # one rank writes the branch; the others wait in open_run, where all ranks meet
        if source is not None and stage is not None:
            branch(recipe, source, stage)
        if not _sealed(recipe, _current_stage(recipe, stage)):
            raise UserError(
                f"{recipe.run.dir}: its current stage is not sealed; run `mugrpo generate` with this recipe first"
            )
    if recipe.eval.every_updates:
        say("eval.every_updates: nothing is evaluated inside the stage, since `mugrpo optimize` has no engine")
    with open_run(recipe, None, generates=False) as (run, learner, engines, cursor):
        after = optimize_stage(run, learner, engines, cursor)
        export(run, learner, after)
    say(f"stage {cursor.stage} is optimized; Hugging Face checkpoint: {run.directory.hf}")


def _current_stage(recipe: Recipe, stage: int | None) -> int:
    """Returns the number of the run's current stage. UserError when `stage` is given and is not this number, or when
    the run has taken all of its updates."""
    from mugrpo_megatron.run.checkpoints import check_stage_sealed, newest_cursor
    from mugrpo_megatron.run.directory import RunDirectory

    directory = RunDirectory(recipe.run.dir)
    cursor = newest_cursor(directory.checkpoints)
    check_stage_sealed(directory, cursor)
    if cursor.finished(recipe.schedule):
        raise UserError(
            f"{recipe.run.dir} has taken all of its {cursor.updates} updates; run `mugrpo train` to write its results, "
            "or raise schedule.stages to continue it"
        )
    if stage not in (None, cursor.stage):
        raise UserError(
            f"{recipe.run.dir} is at stage {cursor.stage}, update {cursor.age} (both from 0), not at stage {stage}: "
            f"omit --stage, or branch with `mugrpo optimize --stage {stage} --from RUN_DIR`"
        )
    return cursor.stage


def _sealed(recipe: Recipe, stage: int) -> bool:
    from mugrpo_megatron.run.directory import RunDirectory
    from mugrpo_megatron.stages.store import StageStore

    return StageStore(RunDirectory(recipe.run.dir).stage(stage)).sealed


def sft(options: Options) -> int:
    """Fine-tune a model on rows, or train a new one on a bundled task."""

    def run(recipe: Recipe) -> None:
        from mugrpo_megatron.checks.preflight import check_warm_start
        from mugrpo_megatron.commands.warm_start import check_warm_start_output

        check_warm_start_output(recipe)
        recipe = check_warm_start(recipe, say)
        say(IMPORTING)
        from mugrpo_megatron.commands.sft import train

        train(recipe)

    return with_recipe(options, run, lambda recipe: recipe.sft.output)
