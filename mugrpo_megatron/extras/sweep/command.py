"""The arguments of `mugrpo sweep`, and the checks before Megatron is imported."""

from __future__ import annotations

from pathlib import Path

from mugrpo_megatron import __version__
from mugrpo_megatron.commands.common import IMPORTING, Options, Parser, override_arguments, say
from mugrpo_megatron.terminal import visible


def sweep_arguments(parser: Parser) -> None:
    """Add the arguments of `mugrpo sweep`: a run's stage, and the grid of settings."""
    parser.add_argument("run_dir", type=Path, help="directory of the run that has generated the stage")
    parser.add_argument("--stage", type=int, default=0, metavar="K", help="number of the sealed stage, from 0")
    override_arguments(parser, "VALUE,VALUE", "an axis of the grid; with one value, a setting of every cell")
    parser.add_argument(
        "--grid", type=Path, metavar="FILE", help="TOML file that defines the grid, with [set], [axes] and [[cells]]"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="directory of the cells' runs; by default RUN_DIR-sweep-stageK"
    )
    parser.add_argument("--dry-run", action="store_true", help="check all cells, print their states, and stop")


def sweep(options: Options) -> int:
    """Run the cells of the grid that are not finished; with --dry-run only check all cells and print their states."""
    from mugrpo_megatron.checks.preflight import check_run
    from mugrpo_megatron.extras.sweep.cells import Sweep, check_sweep, states
    from mugrpo_megatron.extras.sweep.grid import cells_of, read_grid
    from mugrpo_megatron.run.directory import RunDirectory

    source, stage = options.run_dir, options.stage
    out = options.out or source.parent / f"{source.name}-sweep-stage{stage}"
    sweep = Sweep(source, stage, out, cells_of(read_grid(options.overrides, options.grid), RunDirectory(source), out))
    sweep, origin = check_sweep(sweep)
    if options.dry_run:
        print(visible(states(sweep)))
        return 0
    say(visible(f"mugrpo {__version__}: {len(sweep.cells)} cells on stage {stage} of {source} -> {out}"))
    _, problems = check_run(sweep.cells[0].recipe, say)
    say(IMPORTING)
    from mugrpo_megatron.extras.sweep.sweep import run_sweep

    return run_sweep(sweep, origin, problems)
