"""Collect the finished cells below --out into docs/study/cells.csv and docs/study/curves.csv.

    python -m run_scripts.study.collect --out DIR

A row of cells.csv is one cell, a row of curves.csv a window of its updates. Cells that the files already hold and
that are not below --out are kept, so that a study can continue elsewhere (`run --kept docs/study`). They are dropped if
--out has another stage for their seed, because cells of a seed are compared on the same stage; the tuning seed's stay.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from mugrpo_megatron.observe.rundata import RunData, paper_seconds, read_run
from run_scripts.study.cells import Cell
from run_scripts.study.grid import GRID, Grid, load_grid
from run_scripts.study.results import CELLS, CURVES, DOCS, Row, cell_of, read_kept, read_results
from run_scripts.study.run import Study, commits_of

WINDOW = 32
"""Updates of a row of curves.csv."""
EARLY = 100
"""The first updates of a run, in which the regime is checked."""
LATE = 64
"""The last updates of a run."""
TAIL = 16
"""Updates at a stage's end whose mean says how far the stage has moved; a quarter of a shorter stage than 4 x this."""
KEY = ("seed", "repeat", "method", "rate")
CELL_COLUMNS = (
    *KEY,
    *("warm_start", "stage", "same_as", "commit", "updates", "problems", "seconds"),
    *("before", "after", "low", "high", "truncated_before", "truncated_after"),
    *("clipped", "clipped_early", "clipped_late", "ratio_neg_early", "ratio_neg_p01_early", "ratio_neg_late"),
    *("ratio_neg_min", "first_trigger", "trigger_tokens", "trigger_responses", "vetoed", "vetoed_late"),
    *("ess_min", "ess_late", "kl_k3_late", "entropy_late"),
    *("stage_reward", "stage_truncated", "stage_tokens", "zero_variance", "mismatch_mean"),
    *("nats_first", "nats", "nats_last", "stages", "rollout_seconds"),
)
"""Accuracies and fractions are shares. `_early` is over the first 100 updates, `_late` over the last 64, else over all.
`first_trigger` is the update before which the first ratio below the method's threshold was seen, empty if there was
none; `trigger_tokens` and `trigger_responses` are of ratios below 1e-4 in every cell. The `nats` are those that the
first, the mean and the last stage moved a response; `rollout_seconds` are those of `paper_seconds` that went into
sampling. Cells of the first parts have none of these five."""
AVERAGED = ("clipped_fraction", "ratio_neg_mean", "vetoed_fraction", "trigger_tokens_1e-4", "ess", "entropy")
"""Metrics of the updates whose means over a window stand in curves.csv, under their own names."""
CURVE_COLUMNS = (*KEY, "update", "accuracy", "truncated", *AVERAGED, "ratio_neg_min")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="where the runs are")
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the csv files go")
    options = parser.parse_args(arguments)
    kept = read_kept(options.docs)  # rates were found with its cells, and say which cells to look for
    study = Study(load_grid(options.grid), options.out.resolve(), kept=kept)
    rows, curves = collect(study)
    old = read_results(study.grid, options.docs)
    others = [row for row in old.rows if _kept(study, row, rows)]
    names = {_key(row) for row in others}
    curves += [row for row in old.curves if _key(row) in names]
    write_rows(options.docs / CELLS, CELL_COLUMNS, sorted([*rows, *others], key=_key))
    write_rows(options.docs / CURVES, CURVE_COLUMNS, sorted(curves, key=_key))
    print(f"{len(rows)} cells from {options.out} and {len(others)} kept ones into {options.docs}")
    return 0


def collect(study: Study) -> tuple[list[Row], list[Row]]:
    """Rows of cells.csv and curves.csv, of every finished cell below the study's directory."""
    rows: dict[Cell, Row] = {}
    curves: list[Row] = []
    done = study.outcomes()
    for cell in sorted(done):
        if (study.directory(cell) / "summary.json").exists():
            run, stage = read_run(study.directory(cell)), _stage_of(study, cell)
            rows[cell] = row_of(study, cell, run, stage)
            curves += curve_of(study.grid, cell, run, stage)
    kept = {cell for cell, (stage, _) in study.kept.items() if study.counts(cell, stage)}
    for cell in sorted(done.keys() - rows.keys() - kept):
        twin = study.grid.methods[cell.method].twin
        found = rows.get(Cell(cell.seed, twin, cell.rate, cell.repeat)) if twin else None
        if found:
            rows[cell] = found | {"method": cell.method, "same_as": twin}
    return list(rows.values()), curves


def row_of(study: Study, cell: Cell, run: RunData, stage: RunData) -> Row:
    """One row of cells.csv. `stage` is the run that generated the cell's stage, or the cell's own."""
    name = study.grid.set_of(cell.seed)
    first, last = stage.evals[0], run.evals[-1]
    early, late = run.updates[:EARLY], run.updates[-LATE:]
    moved = nats_of(run.updates, tokens_of(run))
    return {
        "seed": cell.seed,
        "repeat": cell.repeat,
        "method": cell.method,
        "rate": cell.rate,
        "warm_start": int(study.warm_start(cell.seed).name.rpartition("-")[2]),
        "stage": study.fingerprint(cell),
        "same_as": "",
        "commit": commits_of(study.directory(cell)),
        "updates": len(run.updates),
        "problems": last[f"problems/{name}"],
        "seconds": round(run.seconds),
        "before": first[f"accuracy/{name}"],
        "after": study.grid.end([row[f"accuracy/{name}"] for row in run.evals]),
        "low": _short(last[f"low/{name}"]),
        "high": _short(last[f"high/{name}"]),
        "truncated_before": _short(first[f"truncated/{name}"]),
        "truncated_after": _short(last[f"truncated/{name}"]),
        "clipped": over(run.updates, "clipped_fraction"),
        "clipped_early": over(early, "clipped_fraction"),
        "clipped_late": over(late, "clipped_fraction"),
        "ratio_neg_early": over(early, "ratio_neg_mean"),
        "ratio_neg_p01_early": over(early, "ratio_neg_p01", statistics.median),
        "ratio_neg_late": over(late, "ratio_neg_mean"),
        "ratio_neg_min": over(run.updates, "ratio_neg_min", min),
        "first_trigger": first_below(run.updates, study.grid.threshold(cell.method)),
        "trigger_tokens": over(run.updates, "trigger_tokens_1e-4"),
        "trigger_responses": over(run.updates, "trigger_responses_1e-4"),
        "vetoed": over(run.updates, "vetoed_fraction"),
        "vetoed_late": over(late, "vetoed_fraction"),
        "ess_min": over(run.updates, "ess", min),
        "ess_late": over(late, "ess"),
        "kl_k3_late": over(late, "kl_k3"),
        "entropy_late": over(late, "entropy"),
        "stage_reward": over(run.stages, "reward_mean"),
        "stage_truncated": over(run.stages, "truncated_fraction"),
        "stage_tokens": over(run.stages, "generated_tokens", sum),
        "zero_variance": over(run.stages, "zero_variance_fraction"),
        "mismatch_mean": over(run.stages, "mismatch_mean"),
        "nats_first": _short(moved[0]),
        "nats": _short(statistics.fmean(moved)),
        "nats_last": _short(moved[-1]),
        "stages": len(moved),
        "rollout_seconds": round(paper_seconds(stage.phases)["T_rollout"]),
    }


def curve_of(grid: Grid, cell: Cell, run: RunData, stage: RunData) -> list[Row]:
    """The cell's rows of curves.csv: its start, then every window of updates with the evaluation at its end.

    An evaluation inside a window, as at the end of a short stage, has a row of its own, without the updates' metrics.
    """
    name = grid.set_of(cell.seed)
    key = {"seed": cell.seed, "repeat": cell.repeat, "method": cell.method, "rate": cell.rate}
    evals = {row["update"]: row for row in (stage.evals[0], *run.evals)}
    rows: list[Row] = []
    ends = range(0, len(run.updates) + 1, WINDOW)
    for end in sorted({*ends, *evals}):
        window = run.updates[max(0, end - WINDOW) : end] if end in ends else []
        own: Row = key | {"update": end} | {metric: over(window, metric) for metric in AVERAGED}
        if end in evals:
            own |= {"accuracy": evals[end][f"accuracy/{name}"], "truncated": _short(evals[end][f"truncated/{name}"])}
        rows.append(own | {"ratio_neg_min": over(window, "ratio_neg_min", min)})
    return rows


def _stage_of(study: Study, cell: Cell) -> RunData:
    """The run that generated the cell's first stage."""
    return read_run(study.stage(cell) if study.grid.shares_stage(cell.method) else study.directory(cell))


def _kept(study: Study, row: Row, rows: Sequence[Row]) -> bool:
    """Whether a row of the csv file stays: its cell was not collected again, and it fits the stage below --out."""
    fresh = {_key(one) for one in rows}
    return _key(row) not in fresh and study.counts(cell_of(row), row["stage"])


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Write a csv file of the study; `results.read_rows` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(rows)


def tokens_of(run: RunData) -> float:
    """Mean tokens of the responses that a run has trained on."""
    return float(sum(one["generated_tokens"] for one in run.stages) / sum(one["responses"] for one in run.stages))


def nats_of(updates: Sequence[Row], tokens: float) -> list[float]:
    """KL(behaviour | policy) of a response at the end of each stage, in nats, for responses of `tokens` tokens.

    The k3 estimate a token, a mean over the stage's last `TAIL` updates, or its last quarter where that is shorter.
    """
    moved = []
    for _, rows in groupby(updates, key=itemgetter("stage")):
        values = [row["kl_k3"] for row in rows]
        moved.append(tokens * statistics.fmean(values[-max(1, min(TAIL, len(values) // 4)) :]))
    return moved


def first_below(updates: Iterable[Row], threshold: float) -> int | None:
    """The update before which the first ratio below the threshold was seen; None if there was none."""
    return next((row["update"] for row in updates if row.get("ratio_neg_min", 1.0) < threshold), None)


def over(rows: Sequence[Row], name: str, of: Callable[[list[float]], float] = statistics.fmean) -> float | None:
    """A figure over the rows that have the metric; None without any."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return _short(of(values)) if values else None


def _short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
