"""Run part eight's cells in the order of its plan, docs/study/part-eight.md. The same command continues.

    python -m run_scripts.dev.part_eight.run --out DIR              # every cell that is missing
    python -m run_scripts.dev.part_eight.run --out DIR --dry-run    # every cell with its state

Run it in the repository's root. A warm start is a run of `mugrpo sft`, a cell one of `mugrpo train`; a cell that was
interrupted goes on from its last checkpoint. When a cell ends, its rows are written to DOCS/GRID/cells.csv and
curves.csv; a cell that stands there is not run again. A cell that fails is named, and the others go on; the next call
tries it again. On Ctrl-C and SIGTERM the running command saves before it ends.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.rundata import read_run
from run_scripts.dev.part_eight.cells import Cell, Grid, load_grid, settings, wanted
from run_scripts.dev.part_eight.rows import (
    CELL_COLUMNS,
    CELLS,
    CURVE_COLUMNS,
    CURVES,
    add_rows,
    cell_of,
    cell_row,
    curve_rows,
    read_rows,
)

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "docs/study"
GRIDS = ("eight_large", "eight_small", "eight_explored")
"""Directories of docs/study, in the order in which their cells run; one without grid.toml is left out."""
BASE = STUDY / "eight.toml"
"""The recipe that all runs have in common."""
BULK = ("checkpoints", "stages", "proximal", "probe", "hf", "profile")
"""Directories that are deleted from a finished cell."""
SAME_SUMS = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
"""Environment variables with which PyTorch adds in the same order on every x86-64 machine."""


class Interrupted(Exception):
    """Raised when SIGINT or SIGTERM was received."""


@dataclass(frozen=True, slots=True)
class Part:
    """A grid, the directory of its runs, and the directory of its csv files."""

    grid: Grid
    out: Path
    docs: Path

    def warm_start(self, seed: int) -> Path:
        return self.out / f"warm-start-{seed}"

    def fingerprint(self, seed: int) -> str:
        """The first twelve digits of the SHA-256 of the seed's warm start; "" before it exists."""
        weights = self.warm_start(seed) / "hf" / "model.safetensors"
        return sha256(weights.read_bytes()).hexdigest()[:12] if weights.exists() else ""

    def ends(self) -> dict[Cell, float]:
        """Cell -> accuracy at the end, for the cells in cells.csv.

        Test cells of one seed are compared with each other, so rows that began with another warm start than the one
        here are left out.
        """
        rows = read_rows(self.docs / CELLS)
        prints = {seed: self.fingerprint(seed) for seed in self.grid.test_seeds}
        counted = [row for row in rows if prints.get(int(row["seed"]), "") in ("", row["warm_start"])]
        return {cell_of(row): float(row["end"]) for row in counted}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        parts = [
            Part(load_grid(options.docs / name / "grid.toml"), options.out.resolve() / name, options.docs / name)
            for name in GRIDS
            if (options.docs / name / "grid.toml").exists()
        ]
        if options.dry_run:
            for part in parts:
                show(part)
            return 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _interrupt)
        return max([run_part(part) for part in parts], default=0)
    except UserError as error:
        print(f"part eight: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("part eight: interrupted; the same command continues", flush=True)
        return 130


def run_part(part: Part) -> int:
    """Run every cell that is missing; results of tuning cells decide which follow. Returns 1 if a cell failed, else
    0."""
    failed: set[Cell] = set()
    while True:
        ends = part.ends()
        cell = next((one for one in wanted(part.grid, ends) if one not in ends and one not in failed), None)
        if cell is None:
            return 1 if failed else 0
        if not part.fingerprint(cell.seed):
            if not _warm_start(part, cell.seed):
                return 1
            continue  # rows of another warm start no longer count
        if not run_cell(part, cell):
            failed.add(cell)


def run_cell(part: Part, cell: Cell) -> bool:
    """Run one cell and write its rows; returns whether it has finished."""
    directory = part.out / "cells" / cell.name
    directory.mkdir(parents=True, exist_ok=True)
    keys = {**part.grid.shared, **settings(part.grid, cell), "run.dir": directory}
    keys["model.path"] = part.warm_start(cell.seed) / "hf"
    before = _cpu_seconds()
    if not _call("train", keys, directory / "console.log"):
        return False
    run, task = read_run(directory), str(keys["data.eval"])
    warm_start = part.fingerprint(cell.seed)
    row = cell_row(cell, run, task, warm_start=warm_start, commit=commit(), cpu_seconds=round(_cpu_seconds() - before))
    add_rows(part.docs / CURVES, CURVE_COLUMNS, curve_rows(cell, run, task, warm_start))
    add_rows(part.docs / CELLS, CELL_COLUMNS, [row])  # last: a cell that stands here is finished
    for folder in BULK:
        shutil.rmtree(directory / folder, ignore_errors=True)
    print(
        f"{cell.name}: {100 * row['before']:.1f} -> {100 * row['end']:.1f} %, {row['seconds']} s, "
        f"{row['cpu_seconds']} CPU seconds",
        flush=True,
    )
    return True


def show(part: Part) -> None:
    """Print every cell that is known to run so far, with its state."""
    ends, cells = part.ends(), list(dict.fromkeys(wanted(part.grid, part.ends())))
    for cell in cells:
        begun = (part.out / "cells" / cell.name / "metrics.jsonl").exists()
        state = f"{100 * ends[cell]:5.1f} %" if cell in ends else "begun" if begun else "missing"
        print(f"{state:8} {part.docs.name} {cell.name}")
    print(f"{part.docs.name}: {sum(cell in ends for cell in cells)} of {len(cells)} cells that are decided have run")


def commit() -> str:
    """The commit of this repository, with `+` when its code differs from it."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    code = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "mugrpo_megatron", "run_scripts"]).returncode
    return (found or "unknown") + "+" * bool(code)


def _warm_start(part: Part, seed: int) -> bool:
    out = part.warm_start(seed)
    part.out.mkdir(parents=True, exist_ok=True)
    return _call("sft", {**part.grid.shared, "run.seed": seed, "sft.output": out}, part.out / f"{out.name}.log")


def _call(command: str, keys: Mapping[str, Any], log: Path) -> bool:
    """Run a `mugrpo` command to its end, with its output in `log`; returns whether it succeeded.

    Raises Interrupted after the command was asked to end and has ended.
    """
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={_toml(value)}")]
    with log.open("ab") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "mugrpo_megatron", command, str(BASE), *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process, which terminates the command
            env=os.environ | SAME_SUMS,
        )
        try:
            code = process.wait()
        except Interrupted:
            process.terminate()
            process.wait()
            raise
    if code:
        print(f"mugrpo {command} FAILED with exit code {code}: see {log}", flush=True)
    return code == 0


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cpu_seconds() -> float:
    """CPU seconds of the processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the runs go")
    parser.add_argument("--docs", type=Path, default=STUDY, help="where grids and csv files are")
    parser.add_argument("--dry-run", action="store_true", help="list cells and states, run nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
