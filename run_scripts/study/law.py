"""The cells of docs/study/law.md: run what is missing, one after the other, and collect the finished ones.

    python -m run_scripts.study.law --out DIR              # everything, in the plan's order; Ctrl-C saves
    python -m run_scripts.study.law --out DIR --dry-run    # every step with its state
    python -m run_scripts.study.law --out DIR --collect    # law*.csv, in docs/study

Run it in the repository's root. DIR/START is a study's directory of its own (run.py) for each warm start. Each end,
and each warm start, is also sampled: 8 responses to every test problem, and 64 of the warm start of E1.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.rundata import RunData, read_run
from run_scripts.study.cells import Cell
from run_scripts.study.collect import CELL_COLUMNS, CURVE_COLUMNS, collect, nats_of, tokens_of, write_rows
from run_scripts.study.grid import Grid, load_grid
from run_scripts.study.results import DOCS, Row, cell_of
from run_scripts.study.run import BASE, BULK, ROOT, Interrupted, Study, interrupt, run_cell, run_logged

GRID = Path(__file__).with_name("law_grid.toml")
SEED = 10
STARTS = {"start-42": 0.42, "start-58": 0.58, "start-62": 0.62, "start-88": 0.88}
"""Warm start -> the greedy accuracy at which `mugrpo sft` stops."""
E1 = "start-58"
"""The warm start whose test problems get `MANY` samples."""
STEPS = (
    *((E1, "stale"), (E1, "fresh")),
    *(("start-88", block) for block in ("stale", "fresh")),
    (E1, "stages"),
    *((start, block) for start in ("start-62", "start-42") for block in ("stale", "fresh")),
    *((E1, block) for block in ("stages_half", "fresh_half")),
)
"""(warm start, block of law_grid.toml), in the order in which they run."""
NOT_ENDS = tuple(name for name in BULK if name != "hf")
"""What is deleted from a finished cell whose end is sampled."""
FEW, MANY = 8, 64
"""Samples of each test problem, at temperature 1."""
CSV, CURVES, STAGES, PROBLEMS = "law.csv", "law_curves.csv", "law_stages.csv", "law_problems.csv"
OWN_COLUMNS = ("start", "start_sampled", "sampled", "gap", "gap_half")
"""What law.csv has besides the columns of cells.csv: the warm start and its sampled accuracy, that of the end, by how
much it is below GRPO's, and half of that difference's 95 % interval over problems."""
REFERENCE = ("grpo", 4e-5)
"""Method and rate of the cell that all of a warm start are compared with."""
Z975 = 1.96
STAGE_COLUMNS = ("start", "method", "rate", "stage", "update", "sampled", "nats")
"""A stage: the update before which it was sampled, the accuracy of its responses on training problems, and the nats
that it had moved at its end."""
PROBLEM_COLUMNS = ("start", "problem", "of", "method", "rate", "samples", "right")
"""`of` is `start` for the warm start, whose method and rate are empty, or `end`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """An evaluation with several samples of every test problem."""

    right: Mapping[str, int]
    """Problem -> its right samples."""
    samples: int

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.right.values()) / self.samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the runs go")
    parser.add_argument("--dry-run", action="store_true", help="list steps and states, run nothing")
    parser.add_argument("--collect", action="store_true", help="only write the csv files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the csv files go")
    options = parser.parse_args(arguments)
    studies = studies_of(load_grid(GRID), options.out.resolve())
    try:
        if options.dry_run:
            _show(studies)
            return 0
        if not options.collect:
            signal.signal(signal.SIGTERM, interrupt)
            signal.signal(signal.SIGINT, interrupt)
            finished = [run_step(studies[start], start, block) for start, block in STEPS]
            if not all(finished):
                return 1
        write_all(studies, options.docs)
        return 0
    except UserError as error:
        print(f"law: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("law: interrupted; the same command continues")
        return 130


def studies_of(grid: Grid, out: Path) -> dict[str, Study]:
    """Warm start -> its study, which keeps the models at the ends of its cells: they are sampled later."""
    return {start: Study(grid, out / start, bulk=NOT_ENDS) for start in STARTS}


def cells_of(grid: Grid, block: str) -> list[Cell]:
    """The cells of a block, in their order."""
    one = grid.blocks[block]
    return [Cell(SEED, method, one.rate) for method in one.methods if one.rate is not None]


def run_step(study: Study, start: str, block: str) -> bool:
    """Make the warm start if it is missing, run the block's unfinished cells, sample the end of each.

    Returns whether all of it has finished.
    """
    model = study.warm_start(SEED)
    study.out.mkdir(parents=True, exist_ok=True)
    if not (model / "hf" / "config.json").exists():
        own = [f"run.seed={SEED}", f"sft.output={model}", f"sft.target_accuracy={STARTS[start]}"]
        if not _call(["sft", str(study.base), *_set(own)], study.out / "warm-start.log"):
            return False
    samples = MANY if start == E1 else FEW
    finished = [sample(model / "hf", study.out / f"start-{samples}", samples)]
    finished += [run_sampled(study, cell) for cell in cells_of(study.grid, block)]
    return all(finished)


def run_sampled(study: Study, cell: Cell) -> bool:
    """Run a cell if it is missing and sample its end; whether both finished. The study keeps the ends of its cells."""
    end = study.directory(cell)
    ran = study.outcome(cell) is not None or run_cell(study, cell)
    return ran and sample(end / "hf", end / f"end-{FEW}", FEW)


def sample(model: Path, out: Path, samples: int) -> bool:
    """Sample every test problem, into `out`; whether that finished."""
    if (out / "summary.json").exists():
        return True
    words = [str(model), "--data", "chain", "--samples", str(samples), "--temperature", "1", "--out", str(out)]
    return _call(["eval", *words, "--recipe", str(BASE)], out.with_suffix(".log"))


def write_all(studies: Mapping[str, Study], docs: Path) -> None:
    """Write the law's csv files of all finished cells."""
    rows: list[Row] = []
    curves: list[Row] = []
    stages: list[Row] = []
    problems: list[Row] = []
    for start, study in studies.items():
        own, own_curves = collect(study)
        before = read_sampled(study.out / f"start-{MANY if start == E1 else FEW}")
        reference = read_end(study, Cell(SEED, *REFERENCE))
        for row in own:
            cell = cell_of(row)
            after = read_end(study, cell)
            run = read_run(study.directory(cell))
            stages += [{"start": start} | one for one in stage_rows(row, run)]
            own_columns: Row = {
                "start_sampled": before and round(before.accuracy, 5),
                "sampled": after and round(after.accuracy, 5),
            }
            if reference and after and (row["method"], row["rate"]) != REFERENCE:
                own_columns |= dict(zip(("gap", "gap_half"), difference(reference, after), strict=True))
            rows.append({"start": start} | row | own_columns)
            if start == E1:
                problems += problem_rows(after, start=start, of="end", method=row["method"], rate=row["rate"])
        curves += [{"start": start} | row for row in own_curves]
        if start == E1:
            problems = [*problem_rows(before, start=start, of="start"), *problems]
    write_rows(docs / CSV, ("start", *CELL_COLUMNS, *OWN_COLUMNS[1:]), rows)
    write_rows(docs / CURVES, ("start", *CURVE_COLUMNS), curves)
    write_rows(docs / STAGES, STAGE_COLUMNS, stages)
    write_rows(docs / PROBLEMS, PROBLEM_COLUMNS, problems)
    print(f"{len(rows)} cells into {docs / CSV}")


def stage_rows(row: Row, run: RunData) -> Iterator[Row]:
    """The rows of law_stages.csv of one cell."""
    moved = nats_of(run.updates, tokens_of(run))
    starts = (one["update"] for one in run.stage_starts())
    for one, update, nats in zip(run.stages, starts, moved, strict=True):
        known = {name: row[name] for name in ("method", "rate")}
        yield known | {"stage": one["stage"], "update": update, "sampled": one["reward_mean"], "nats": f"{nats:.4g}"}


def difference(left: Sampled, right: Sampled) -> tuple[float, float]:
    """left - right of sampled accuracy, and half of its 95 % interval over the problems, which both have."""
    values = [left.right[name] / left.samples - right.right[name] / right.samples for name in left.right]
    half = Z975 * statistics.stdev(values) / math.sqrt(len(values))
    return round(statistics.fmean(values), 5), round(half, 5)


def read_sampled(directory: Path) -> Sampled | None:
    """A finished evaluation of `sample`; None without one."""
    if not (directory / "summary.json").exists():
        return None
    lines = (directory / "problems.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = {row["problem"]["question"]: row["rewards"] for row in map(json.loads, lines)}
    right = {question: sum(reward >= 1.0 for reward in own) for question, own in rewards.items()}
    return Sampled(right, len(next(iter(rewards.values()))))


def read_end(study: Study, cell: Cell) -> Sampled | None:
    """The samples of the cell's end, by `run_sampled`; None before they are finished."""
    return read_sampled(study.directory(cell) / f"end-{FEW}")


def problem_rows(sampled: Sampled | None, **key: str | float) -> Iterator[Row]:
    """The rows of law_problems.csv of one evaluation, in the order of the questions."""
    if sampled:
        for question, right in sorted(sampled.right.items()):
            yield {**key, "problem": question, "samples": sampled.samples, "right": right}


def _show(studies: Mapping[str, Study]) -> None:
    for start, block in STEPS:
        study = studies[start]
        for cell in cells_of(study.grid, block):
            outcome = study.outcome(cell)
            state = f"{100 * outcome.before:.1f} -> {100 * outcome.after:.1f} %" if outcome else "missing"
            print(f"{start} {cell.name:24} {state}")


def _set(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def _call(words: Sequence[str], log: Path) -> bool:
    """Run a `mugrpo` command to its end, its output into `log`; whether it succeeded."""
    log.parent.mkdir(parents=True, exist_ok=True)
    code = run_logged([sys.executable, "-m", "mugrpo_megatron", *words], log, ROOT)
    if code:
        print(f"mugrpo {words[0]} failed with exit code {code}: see {log}", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
