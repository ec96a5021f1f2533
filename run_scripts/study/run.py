"""Run the study's grid: every cell is one `mugrpo train`. Finished cells are skipped, interrupted ones continue.

    python -m run_scripts.study.run                        # everything, the main question first
    python -m run_scripts.study.run --part headline        # one part
    python -m run_scripts.study.run --cells 'kappa_*'      # cells whose name matches
    python -m run_scripts.study.run --dry-run              # every cell with its state, and the time that is left
    python -m run_scripts.study.run --kept docs/study      # only cells that the kept results lack
    python -m run_scripts.study.run --clock 3              # the tuned headline 3 more times, for its wall-clock
    python -m run_scripts.study.run --restart 3            # GRPO and mu-GRPO with an engine that ends between stages

Run it in the repository's root. It makes the warm start first if it is missing. It names a cell that fails and goes on
with the others; the next call tries that cell again. On Ctrl-C and SIGTERM, running cells save before they end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.progress import duration
from run_scripts.study.grid import (
    GRID,
    Cell,
    Grid,
    State,
    Waiting,
    accuracies,
    best_rate,
    load_grid,
    minutes_of,
    overrides,
    state_of,
    wanted,
)
from run_scripts.study.processes import CPU_FILE, CpuMeter
from run_scripts.study.results import CLOCK, COMPARED, RESTART, read_results

BASE = Path(__file__).with_name("base.toml")
BULK = ("checkpoints", "stages", "hf")
"""Directories that are deleted from a finished cell."""
SAME_SUMS = {"ATEN_CPU_CAPABILITY": "avx2"}
"""Environment in which PyTorch sums in the same order on every x86-64 machine. By default it uses AVX-512 if the
processor has it, and the warm start becomes another model: 45.7 % instead of 50.8 %."""
AGAIN: dict[str, tuple[str, ...]] = {CLOCK: (), RESTART: ("engine.between_stages=restart",)}
"""Kinds of runs that are repeated for their wall-clock, and the settings that they add to their cell's."""


@dataclass(frozen=True, slots=True)
class Study:
    """The study's directories, grid and program."""

    grid: Grid
    base: Path
    out: Path
    model: Path
    program: tuple[str, ...] = (sys.executable, "-m", "mugrpo_megatron")
    kept: Mapping[Cell, float] = field(default_factory=dict)
    """Accuracies of cells that ran elsewhere and are not run again."""

    def accuracies(self) -> dict[Cell, float]:
        """Accuracies of all finished cells."""
        return {**self.kept, **accuracies(self.grid, self.out)}

    def directory(self, cell: Cell) -> Path:
        return self.out / cell.name

    def state(self, cell: Cell, directory: Path | None = None) -> State:
        """State of the cell's run, or of its run in another directory."""
        if directory is None and cell in self.kept:
            return State.DONE
        return state_of(directory or self.directory(cell), self.grid.variants()[cell.variant].updates)


@dataclass(frozen=True, slots=True)
class Running:
    """A cell whose process is running."""

    cell: Cell
    directory: Path
    process: subprocess.Popen[bytes]
    meter: CpuMeter
    console: IO[bytes]
    started: float


class Interrupted(Exception):
    """SIGINT or SIGTERM was received."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        grid = load_grid(options.grid)
        model = options.model or options.out / "warm-start" / "hf"
        kept = read_results(grid, options.kept).accuracies() if options.kept else {}
        study = Study(grid, options.base, options.out, model, kept=kept)
        known = [part.name for part in grid.parts]
        if unknown := sorted(set(options.part) - set(known)):
            raise UserError(f"--part {', '.join(unknown)}: the grid has {', '.join(known)}")
        if options.dry_run:
            _show(study, _chosen(study, options))
            return 0
        signal.signal(signal.SIGTERM, _interrupt)
        signal.signal(signal.SIGINT, _interrupt)
        _warm_start(study, given=options.model is not None)
        again = {CLOCK: options.clock, RESTART: options.restart}
        if any(again.values()):
            return max(remeasure(study, times, kind) for kind, times in again.items())
        return run_all(study, options)
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("study: interrupted; the same command continues")
        return 130


def _chosen(study: Study, options: argparse.Namespace) -> list[Cell | Waiting]:
    found = wanted(study.grid, study.accuracies(), options.part, options.seeds)
    return [one for one in found if not options.cells or any(fnmatch(one.name, glob) for glob in options.cells)]


def run_all(study: Study, options: argparse.Namespace) -> int:
    """Run all unfinished cells, `jobs` at a time; the results of tuning decide which cells follow.

    Returns 1 when a cell failed or waits for one that did, else 0.
    """
    running: list[Running] = []
    failed: list[Cell] = []
    try:
        while True:
            tried = {one.cell for one in running} | set(failed)
            waiting = [
                one
                for one in _chosen(study, options)
                if isinstance(one, Cell) and one not in tried and study.state(one) is not State.DONE
            ]
            while waiting and len(running) < options.jobs:
                cell = waiting.pop(0)
                running.append(_start(study, cell, study.directory(cell)))
            if not running:
                break
            _watch(study, running, failed, keep=options.keep)
    finally:
        _stop(running)
    left = [one for one in _chosen(study, options) if isinstance(one, Waiting)]
    for cell in failed:
        print(f"failed: {cell.name}, see {study.directory(cell) / 'console.log'}")
    for one in left:
        print(f"not run: {one.name}, its variant is not tuned")
    return 1 if failed or left else 0


def _watch(study: Study, running: list[Running], failed: list[Cell], *, keep: bool) -> None:
    """Wait up to a second for the first running cell, sample all, and remove those that ended from the list."""
    with suppress(subprocess.TimeoutExpired):
        running[0].process.wait(timeout=1.0)
    for one in list(running):
        one.meter.sample()
        code = one.process.poll()
        if code is None:
            continue
        running.remove(one)
        one.console.close()
        done = study.state(one.cell, one.directory) is State.DONE
        if code or not done:
            failed.append(one.cell)
            print(f"{one.cell.name}: FAILED with exit code {code}", flush=True)
            continue
        if not keep:
            for folder in BULK:
                shutil.rmtree(one.directory / folder, ignore_errors=True)
        accuracy = accuracies(study.grid, one.directory.parents[1]).get(one.cell, float("nan"))
        print(f"{one.cell.name}: {100 * accuracy:.1f} % in {duration(time.time() - one.started)}", flush=True)


def _start(study: Study, cell: Cell, directory: Path, extra: Sequence[str] = ()) -> Running:
    directory.mkdir(parents=True, exist_ok=True)
    console = (directory / "console.log").open("ab")
    settings = [f"run.dir={directory}", f"model.path={study.model}", *overrides(study.grid, cell), *extra]
    process = subprocess.Popen(
        [*study.program, "train", str(study.base), *(word for setting in settings for word in ("--set", setting))],
        stdin=subprocess.DEVNULL,
        stdout=console,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process, which terminates the cells
        env=os.environ | SAME_SUMS,
    )
    meter = CpuMeter(psutil.Process(process.pid), directory / CPU_FILE)
    meter.sample()
    return Running(cell, directory, process, meter, console, time.time())


def _stop(running: list[Running]) -> None:
    """Terminate every cell and wait; each saves a checkpoint first."""
    for one in running:
        one.process.terminate()
    for one in running:
        one.process.wait()
        one.console.close()


def remeasure(study: Study, times: int, kind: str = CLOCK) -> int:
    """Run the tuned cells of the first part again, one at a time, below `kind`, which is one of `AGAIN`."""
    first = study.grid.parts[0]
    variants = [variant for variant in first.variants if kind == CLOCK or variant.name in COMPARED]
    done, failed = study.accuracies(), False
    for turn in range(times):
        for variant in variants:
            rate = best_rate(study.grid, variant.name, done)
            if rate is None:
                raise UserError(f"{variant.name} is not tuned yet; run --part {first.name} first")
            cell = Cell(variant.name, rate, turn)
            directory = study.out / kind / cell.name
            if study.state(cell, directory) is State.DONE:
                continue
            failed |= not run_alone(study, cell, directory, AGAIN[kind])
    return int(failed)


def run_alone(study: Study, cell: Cell, directory: Path, extra: Sequence[str] = (), *, keep: bool = False) -> bool:
    """Run one cell from its beginning, with `extra` settings; whether it finished."""
    shutil.rmtree(directory, ignore_errors=True)  # an interrupted run has no wall-clock to measure
    failed: list[Cell] = []
    running = [_start(study, cell, directory, extra)]
    try:
        while running:
            _watch(study, running, failed, keep=keep)
    finally:
        _stop(running)
    return not failed


def _warm_start(study: Study, *, given: bool) -> None:
    if given or (study.model / "config.json").exists():
        return
    command = [*study.program, "sft", str(study.base), "--set", f"sft.output={study.model.parent}"]
    subprocess.run(command, check=True, env=os.environ | SAME_SUMS)


def _show(study: Study, cells: list[Cell | Waiting]) -> None:
    """Print every cell with its state and accuracy, and the estimated time of those that are left."""
    variants = study.grid.variants()
    minutes = {cell: minutes_of(study.directory(cell)) for cell in accuracies(study.grid, study.out)}
    done, left = study.accuracies(), 0
    for one in cells:
        if isinstance(one, Cell) and one in done:
            taken = f"{minutes[one]:5.1f} min" if one in minutes else " kept"
            print(f"done     {one.name:40} {100 * done[one]:5.1f} %  {taken}")
            continue
        left += variants[one.variant].updates
        state = study.state(one) if isinstance(one, Cell) else State.MISSING
        print(f"{'waits' if isinstance(one, Waiting) else state.value:8} {one.name}")
    pace = statistics.median(m / variants[c.variant].updates for c, m in minutes.items()) if minutes else None
    print(f"{sum(isinstance(one, Cell) and one in done for one in cells)} of {len(cells)} cells done; ", end="")
    print(f"the rest takes about {duration(60 * left * pace)} one at a time" if pace else "no pace known yet")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=[], help="parts of the grid (default: all)")
    parser.add_argument("--cells", nargs="+", default=[], metavar="GLOB", help="only cells whose name matches")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of the tuned cells, for all parts")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; use 1 to measure wall-clock")
    parser.add_argument("--dry-run", action="store_true", help="list cells and states, run nothing")
    parser.add_argument(
        "--clock", type=int, default=0, metavar="N", help="repeat the tuned headline N times, to time it"
    )
    parser.add_argument("--restart", type=int, default=0, metavar="N", help="the same, engine ended between stages")
    parser.add_argument("--kept", type=Path, metavar="DOCS", help="directory whose cells.csv holds finished cells")
    parser.add_argument("--keep", action="store_true", help="keep checkpoints and responses of finished cells")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="where results go")
    parser.add_argument("--model", type=Path, help="checkpoint to start from instead of the study's own warm start")
    parser.add_argument("--base", type=Path, default=BASE, help="recipe that every cell shares")
    parser.add_argument("--grid", type=Path, default=GRID, help="the grid")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
