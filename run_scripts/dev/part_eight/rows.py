"""The rows of part eight's csv files: a cell's figures and its curve, and the accuracy at the end that both give."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from mugrpo_megatron.extras.comparison.equal_time import Curve, reached
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.observe.rundata import RunData, paper_seconds
from run_scripts.dev.part_eight.cells import Cell

CELLS, CURVES = "cells.csv", "curves.csv"
KEY = ("way", "rate", "seed", "warm_start")
CELL_COLUMNS = (
    *KEY, "commit", "updates", "problems", "seconds", "cpu_seconds", "before", "end", "low", "high", "truncated",
    "clipped", "vetoed", "ratio_neg_min", "ess_min", "ess_late", "kl_k3_late", "entropy_late", "nats", "stages",
    "T_rollout", "T_total",
)  # fmt: skip
"""`before` and `end` are sampled accuracies, `end` over the last quarter of the curve; `low` and `high` are the
interval of the last evaluation alone. `_late` is over the last 64 updates, other metrics over all; `nats` is the mean
over stages of the nats that a stage moved a response. `cpu_seconds` are those of the run's processes."""
CURVE_COLUMNS = (*KEY, "update", "accuracy")
LATE = 64

Row = Mapping[str, Any]


def mean_of_last_quarter(curve: Mapping[int, float], updates: float) -> float:
    """The accuracy of a run of u updates: the mean over updates [3/4 u, u] of a curve's points, joined by straight
    lines.

    With a constant rate, a run's curve up to u is the curve of a run of u updates. Raises ValueError when the curve
    does not cover these updates.
    """
    points = np.array(sorted(curve), dtype=float)
    figures = np.array([curve[point] for point in sorted(curve)])
    return reached(Curve(points, figures, np.full(len(points), np.nan)), updates).value


def cell_row(cell: Cell, run: RunData, task: str, **known: Any) -> dict[str, Any]:
    """The cell's row of cells.csv. `known` has the columns that cannot be read from its run."""
    first, last = run.evals[0], run.evals[-1]
    curve = {int(row["update"]): float(row[f"accuracy/{task}"]) for row in run.evals}
    late, seconds = run.updates[-LATE:], paper_seconds(run.phases)
    nats = nats_of_stages(run)
    return {
        "way": cell.way,
        "rate": cell.rate,
        "seed": cell.seed,
        **known,
        "updates": len(run.updates),
        "problems": last[f"problems/{task}"],
        "seconds": round(run.seconds),
        "before": first[f"accuracy/{task}"],
        "end": round(mean_of_last_quarter(curve, len(run.updates)), 6),
        "low": _short(last[f"low/{task}"]),
        "high": _short(last[f"high/{task}"]),
        "truncated": _short(last[f"truncated/{task}"]),
        "clipped": _over(run.updates, "clipped_fraction"),
        "vetoed": _over(run.updates, "vetoed_fraction"),
        "ratio_neg_min": _short(min(row.get("ratio_neg_min", 1.0) for row in run.updates)),
        "ess_min": _short(min(row.get("ess", 1.0) for row in run.updates)),
        "ess_late": _over(late, "ess"),
        "kl_k3_late": _over(late, "kl_k3"),
        "entropy_late": _over(late, "entropy"),
        "nats": _short(fmean(nats)),
        "stages": len(nats),
        "T_rollout": round(seconds["T_rollout"]),
        "T_total": round(seconds["T_total"]),
    }


def curve_rows(cell: Cell, run: RunData, task: str, warm_start: str) -> list[dict[str, Any]]:
    """The cell's rows of curves.csv, one for each evaluation."""
    key = {"way": cell.way, "rate": cell.rate, "seed": cell.seed, "warm_start": warm_start}
    return [key | {"update": row["update"], "accuracy": row[f"accuracy/{task}"]} for row in run.evals]


def nats_of_stages(run: RunData) -> list[float]:
    """KL(behaviour | policy) of a response at the end of each stage, in nats.

    The k3 estimate a token, a mean over the last quarter of the stage's updates and at most 16, times the mean tokens
    of a response.
    """
    tokens = sum(row["generated_tokens"] for row in run.stages) / sum(row["responses"] for row in run.stages)
    moved = []
    for _, rows in groupby(run.updates, key=itemgetter("stage")):
        values = [row["kl_k3"] for row in rows]
        moved.append(tokens * fmean(values[-max(1, min(16, len(values) // 4)) :]))
    return moved


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a csv file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def add_rows(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Write the rows into the file, in the order of `KEY`; they replace rows of the same cells."""
    new = [{name: str(row.get(name, "")) for name in columns} for row in rows]
    replaced = {_key(row) for row in new}
    kept = [row for row in read_rows(path) if _key(row) not in replaced]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(sorted([*kept, *new], key=lambda row: (*_key(row), int(row.get("update") or 0))))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def cell_of(row: Mapping[str, str]) -> Cell:
    return Cell(row["way"], float(row["rate"]), int(row["seed"]))


def _key(row: Mapping[str, str]) -> tuple[str, float, int, str]:
    return row["way"], float(row["rate"]), int(row["seed"]), row["warm_start"]


def _over(rows: Sequence[Row], name: str) -> float | str:
    """The mean of a metric over the rows that have it; "" if none has."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return _short(fmean(values)) if values else ""


def _short(value: float) -> float:
    return float(f"{value:.4g}")
