"""Part three of docs/study/plan.md: scopes and thresholds on short answers. Runs what is missing, and collects.

    python -m run_scripts.study.short --out DIR    # writes docs/study/short.csv

Run it in the repository's root. Ctrl-C saves, and the same command continues. Each seed's stage is generated once
(`mugrpo generate`) and swept (`mugrpo sweep`).
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.stages.store import StageStore
from run_scripts.study.collect import first_below, over, write_rows
from run_scripts.study.results import DOCS, SHORT, Row
from run_scripts.study.run import ROOT, SAME_SUMS, commits_of, record_commit
from run_scripts.study.short_tables import BELOW, THRESHOLDS

RECIPE, GRID = (Path(__file__).with_name(name) for name in ("short.toml", "short_grid.toml"))
SEEDS = (0, 1, 2)
SETTINGS = {"objective": "objective.name", "rate": "optimizer.lr", "veto": "objective.veto"}
"""Column of short.csv -> column of a sweep's cells.csv."""
FIGURES = ("before", "after", "problems", "updates", "ess_min", "clipped_fraction_mean", "vetoed_fraction_mean")
COLUMNS = (
    *("seed", *SETTINGS, "threshold", "commit", *FIGURES, "ratio_neg_min", "first_trigger"),
    *BELOW,
)
"""`commit` has all with which the command ran, `first_trigger` the update before which the first ratio below 1e-4 was
seen. Shares are means over the updates."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the runs go")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where short.csv goes")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    record_commit(out)
    warm = out / "warm-start"
    if not (warm / "hf" / "config.json").exists():
        _call("sft", str(RECIPE), "--set", f"sft.output={warm}")
    rows: list[Row] = []
    for seed in SEEDS:
        run, sweep = out / f"seed{seed}", out / f"seed{seed}-sweep"
        if not StageStore(run / "stages" / "00000").sealed:
            own = (f"model.path={warm / 'hf'}", f"run.seed={seed}", f"run.dir={run}")
            _call("generate", str(RECIPE), *(word for one in own for word in ("--set", one)))
        _call("sweep", str(run), "--stage", "0", "--grid", str(GRID), "--out", str(sweep))
        rows += rows_of(seed, sweep)
    write_rows(options.docs / SHORT, COLUMNS, [{**row, "commit": commits_of(out)} for row in rows])
    print(f"{len(rows)} cells into {options.docs / SHORT}")
    return 0


def rows_of(seed: int, sweep: Path) -> list[Row]:
    """The rows of short.csv of one seed's sweep."""
    return [_row(seed, one, read_run(sweep / one["cell"])) for one in _read(sweep / "cells.csv")]


def _row(seed: int, cell: Row, run: RunData) -> Row:
    return {
        "seed": seed,
        **{column: cell[key] for column, key in SETTINGS.items()},
        "threshold": cell["objective.trigger_ratio"],
        **{name: cell[name] for name in FIGURES},
        "ratio_neg_min": cell["ratio_neg_min"],
        "first_trigger": first_below(run.updates, 1e-4),
        **{name: over(run.updates, f"trigger_tokens_{one}") for name, one in zip(BELOW, THRESHOLDS, strict=True)},
    }


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _call(*words: str) -> None:
    """Run a `mugrpo` command to its end; it has this process's terminal, and saves on Ctrl-C."""
    command = [sys.executable, "-m", "mugrpo_megatron", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | SAME_SUMS)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # which the command has received too
        code = process.wait()
    if code:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
