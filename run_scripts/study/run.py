"""Run the study's cells, in the order of docs/study/plan.md. Finished cells are skipped, interrupted ones continue.

    python -m run_scripts.study.run --out DIR                  # everything
    python -m run_scripts.study.run --out DIR --dry-run        # every cell with its state, and the time that is left
    python -m run_scripts.study.run --out DIR --seeds 1 3      # these seeds; a second process can run others
    python -m run_scripts.study.run --out DIR --kept docs/study    # count the cells of a kept cells.csv as finished

Run it in the repository's root. The stage that the cells of a seed share is generated once (`mugrpo generate`). A cell
is a branch of it, as `mugrpo optimize --from` makes one, on which `mugrpo train` takes the updates: unlike `optimize`,
`train` has an engine and evaluates inside the stage. A cell that fails is named, and the others go on; the next call
tries it again. On Ctrl-C and SIGTERM the running command saves before it ends.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import FrameType

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.rundata import read_run
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.stages.store import StageStore
from run_scripts.study.cells import Cell, Outcome, Waiting, draw_name, settings, stage_settings
from run_scripts.study.grid import GRID, Grid, load_grid
from run_scripts.study.results import read_kept
from run_scripts.study.search import of_twin, wanted

ROOT = Path(__file__).parents[2]
BASE = Path(__file__).with_name("base.toml")
BULK = ("checkpoints", "stages", "anchor", "hf", "reference")
"""Directories that are deleted from a finished cell, unless a study says otherwise."""
SAME_SUMS = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
"""Environment in which PyTorch sums in the same order on every x86-64 machine."""
CODE = "code.txt"
"""The commits that a cell ran with, one a line."""


class Interrupted(Exception):
    """SIGINT or SIGTERM was received."""


@dataclass(frozen=True, slots=True)
class Study:
    """The study's grid, directory and program."""

    grid: Grid
    out: Path
    base: Path = BASE
    program: tuple[str, ...] = (sys.executable, "-m", "mugrpo_megatron")
    kept: Mapping[Cell, tuple[str, Outcome]] = field(default_factory=dict)
    """Finished cells of an earlier place: the fingerprint of their stage, and their outcome."""
    bulk: tuple[str, ...] = BULK
    """Directories that are deleted from a finished cell."""

    def warm_start(self, seed: int) -> Path:
        """The warm start that a seed starts from; a tuning seed beyond them has the first."""
        beyond = seed in self.grid.tuning_seeds and seed >= self.grid.warm_starts
        number = 0 if beyond else seed % self.grid.warm_starts
        return self.out / f"warm-start-{number}"

    def stage(self, cell: Cell) -> Path:
        """The run whose stage the cell shares with others."""
        return self.out / "stages" / draw_name(cell.seed, cell.repeat)

    def directory(self, cell: Cell) -> Path:
        return self.out / "cells" / cell.name

    def fingerprint(self, cell: Cell) -> str:
        """Twelve digits that tell the cell's stage from any other; empty without a sealed stage."""
        store = self.stage(cell) / "stages" / "00000"
        if not self.grid.shares_stage(cell.method) or not StageStore(store).sealed:
            return ""
        return sha256((store / "manifest.json").read_bytes()).hexdigest()[:12]

    def outcome(self, cell: Cell) -> Outcome | None:
        """The cell's outcome; None until it has finished."""
        directory = self.directory(cell)
        if (directory / "summary.json").exists():
            run = read_run(directory)
            own = run.evals if not self.grid.shares_stage(cell.method) else read_run(self.stage(cell)).evals
            if len(run.updates) >= self.grid.methods[cell.method].updates:
                name = self.grid.set_of(cell.seed)
                after = self.grid.end([row[f"accuracy/{name}"] for row in run.evals])
                least = min(row.get("ratio_neg_min", 1.0) for row in run.updates)
                return Outcome(own[0][f"accuracy/{name}"], after, run.evals[-1][f"problems/{name}"], least)
        stage, outcome = self.kept.get(cell, ("", None))
        return outcome if self.counts(cell, stage) else None

    def counts(self, cell: Cell, stage: str) -> bool:
        """Whether a kept cell of the stage with this fingerprint counts: cells of a seed are compared on one stage.

        A cell of the tuning seed always counts, because a rate that was found stays.
        """
        return cell.seed in self.grid.tuning_seeds or self.fingerprint(cell) in ("", stage)

    def outcomes(self) -> dict[Cell, Outcome]:
        """All finished cells; looks at each that may be asked for, until no outcome asks for another."""
        found: dict[Cell, Outcome] = {}
        while True:
            cells = {one for one in wanted(self.grid, found) if isinstance(one, Cell)} - found.keys()
            new = {cell: one for cell in cells if (one := self.outcome(cell) or of_twin(self.grid, found, cell))}
            if not new:
                return found
            found |= new


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        kept = read_kept(options.kept) if options.kept else {}
        study = Study(load_grid(options.grid), options.out.resolve(), options.base, kept=kept)
        if options.dry_run:
            _show(study, options.seeds)
            return 0
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)
        return run_all(study, options.seeds)
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("study: interrupted; the same command continues")
        return 130


def run_all(study: Study, seeds: Sequence[int] = ()) -> int:
    """Run all unfinished cells one after the other; outcomes of the tuning seed decide which follow.

    Returns 1 when a cell failed or waits for one that did, else 0.
    """
    failed: list[Cell] = []
    while True:
        done = study.outcomes()
        chosen = [one for one in dict.fromkeys(wanted(study.grid, done)) if _chosen(study, one, seeds)]
        left = [one for one in chosen if isinstance(one, Waiting) or one not in done]
        cells = [one for one in left if isinstance(one, Cell) and one not in failed]
        if not cells:
            break
        if not run_cell(study, cells[0]):
            failed.append(cells[0])
    for one in left:
        print(f"not done: {one.name}" + ("" if one in failed else ", which waits for a cell of the tuning seed"))
    return 1 if left else 0


def run_cell(study: Study, cell: Cell) -> bool:
    """Run one cell with what it needs; whether it finished."""
    from mugrpo_megatron.run.branch import branch  # imports torch, which --dry-run does not need

    directory, model = study.directory(cell), study.warm_start(cell.seed)
    directory.mkdir(parents=True, exist_ok=True)
    shared = [f"{key}={value}" for key, value in study.grid.shared.items()]
    start = [f"model.path={model / 'hf'}", *shared]
    own = [*start, *settings(study.grid, cell), f"run.dir={directory}"]
    if not (model / "hf" / "config.json").exists():
        number = model.name.removeprefix("warm-start-")
        if not _call(
            study, "sft", [f"run.seed={number}", f"sft.output={model}", *shared], study.out / f"{model.name}.log"
        ):
            return False
    if study.grid.shares_stage(cell.method):
        stage = study.stage(cell)
        if not StageStore(stage / "stages" / "00000").sealed:
            draw = stage_settings(study.grid, cell.seed, 1, study.grid.methods[cell.method].mu)
            stage.mkdir(parents=True, exist_ok=True)
            if not _call(study, "generate", [*start, *draw, f"run.dir={stage}"], stage / "console.log"):
                return False
        branch(load_recipe(study.base, own), stage, 0)
    record_commit(directory)
    if not _call(study, "train", own, directory / "console.log") or not (outcome := study.outcome(cell)):
        return False
    for folder in study.bulk:
        shutil.rmtree(directory / folder, ignore_errors=True)
    print(f"{cell.name}: {100 * outcome.before:.1f} -> {100 * outcome.after:.1f} %", flush=True)
    return True


def record_commit(directory: Path) -> None:
    """Add this repository's commit to those that the directory's runs ran with."""
    with (directory / CODE).open("a", encoding="utf-8") as file:
        file.write(f"{commit()}\n")


def commits_of(directory: Path) -> str:
    """The commits that the directory's runs ran with, each once."""
    return " ".join(dict.fromkeys((directory / CODE).read_text(encoding="utf-8").split()))


def commit() -> str:
    """The commit of this repository, with `+` when files differ from it."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    found = subprocess.run(asked, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _call(study: Study, command: str, overrides: Sequence[str], log: Path) -> bool:
    """Run a `mugrpo` command to its end, its output into `log`; when interrupted, it saves first."""
    words = [*study.program, command, str(study.base), *(word for one in overrides for word in ("--set", one))]
    code = run_logged(words, log)
    if code:
        print(f"mugrpo {command} FAILED with exit code {code}: see {log}", flush=True)
    return code == 0


def run_logged(words: Sequence[str], log: Path, cwd: Path | None = None) -> int:
    """The exit code of a command that runs to its end, its output into `log`.

    Raises Interrupted after the command has been asked to end, and has.
    """
    with log.open("ab") as console:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process, which terminates the command
            env=os.environ | SAME_SUMS,
        )
        try:
            return process.wait()
        except Interrupted:
            process.terminate()
            process.wait()
            raise


def _chosen(study: Study, one: Cell | Waiting, seeds: Sequence[int]) -> bool:
    return not seeds or one.seed in (*seeds, *study.grid.tuning_seeds)


def _show(study: Study, seeds: Sequence[int]) -> None:
    """Print every cell with its state, and the estimated time of those that are left."""
    done = study.outcomes()
    cells = [one for one in dict.fromkeys(wanted(study.grid, done)) if _chosen(study, one, seeds)]
    for one in cells:
        if isinstance(one, Cell) and (outcome := done.get(one)):
            print(f"done     {one.name:32} {100 * outcome.before:5.1f} -> {100 * outcome.after:4.1f} %")
        else:
            begun = isinstance(one, Cell) and (study.directory(one) / "metrics.jsonl").exists()
            print(f"{'begun' if begun else 'missing':8} {one.name}")
    ran = [read_run(study.directory(cell)).seconds for cell in done if study.directory(cell).exists()]
    left = sum(isinstance(one, Waiting) or one not in done for one in cells)
    if not left:
        print(f"{len(cells)} of {len(cells)} cells done: nothing is missing")
        return
    pace = f"about {duration(left * statistics.median(ran))}, one at a time" if ran else "an unknown time"
    print(f"{len(cells) - left} of {len(cells)} cells done; the rest takes {pace}, without stages")


def interrupt(number: int, frame: FrameType | None) -> None:
    """For SIGINT and SIGTERM."""
    raise Interrupted


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="where the runs go")
    parser.add_argument("--dry-run", action="store_true", help="list cells and states, run nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="only cells of these seeds, and tuning")
    parser.add_argument("--kept", type=Path, metavar="DOCS", help="directory whose cells.csv holds finished cells")
    parser.add_argument("--base", type=Path, default=BASE, help="recipe that every cell shares")
    parser.add_argument("--grid", type=Path, default=GRID, help="the grid")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
