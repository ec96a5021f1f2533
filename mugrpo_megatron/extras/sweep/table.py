"""The results of a sweep: a table for the terminal, cells.csv, and the cells' curves on one page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from mugrpo_megatron.extras.comparison.comparison import write_comparison
from mugrpo_megatron.extras.sweep.cells import Sweep
from mugrpo_megatron.extras.sweep.grid import Cell, text_of
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.observe.metrics import Row, mean_in, values_in
from mugrpo_megatron.observe.progress import duration, new_table
from mugrpo_megatron.observe.results import (
    format_interval,
    format_value,
    interval_in,
    measure_in,
    problems_in,
    value_in,
)
from mugrpo_megatron.observe.rundata import read_run, seconds_by_phase

CSV, PAGE = "cells.csv", "report.html"
FIGURES = (
    "state", "measure", "before", "after", "low", "high", "problems", "updates", "skipped_updates", "ess_last",
    "ess_min", "kl_k3_last", "clipped_fraction_mean", "vetoed_fraction_mean", "ratio_neg_min", "grad_norm_max",
    "reward_mean", "seconds_optimize", "seconds_total",
)  # fmt: skip
"""Columns of cells.csv after the cell's name and settings; a missing figure is empty."""

Figures = dict[str, Any]


def publish(sweep: Sweep, page: bool) -> Table:
    """Write cells.csv and, with `page`, the page of the finished cells; return a table with the best cell in bold."""
    figures = {cell.name: figures_of(sweep, cell) for cell in sweep.cells}
    write_text(sweep.out / CSV, as_csv(sweep.cells, figures))
    done = [cell for cell in sweep.cells if sweep.finished(cell)]
    if page and done:
        write_comparison([sweep.directory(cell).path for cell in done], sweep.out / PAGE)
    return as_table(sweep, figures)


def figures_of(sweep: Sweep, cell: Cell) -> Figures:
    """Returns the figures of a cell; one that is not finished has its `state` only.

    They are those of the swept stage, even if the cell's run has gone on to later stages. `seconds_total` counts the
    whole run.
    """
    state = sweep.state(cell)
    if state != "finished":
        return {"state": state}
    run = read_run(sweep.directory(cell).path)
    updates = [row for row in run.updates if row["stage"] == sweep.stage]
    seconds = seconds_by_phase([row for row in run.phases if row["stage"] == sweep.stage])
    after = next(row for row in run.evals if row["stage"] > sweep.stage)
    before = next((row for row in run.evals if row["stage"] == sweep.stage and row["age"] == 0), None)
    low, high = interval_in(after) or (None, None)
    return {
        "state": state,
        "measure": measure_in([after]),
        "before": value_in(before) if before else None,
        "after": value_in(after),
        "low": low,
        "high": high,
        "problems": problems_in(after),
        "updates": len(updates),
        "skipped_updates": sum(bool(row.get("skipped")) for row in updates),
        "ess_last": updates[-1].get("ess"),
        "ess_min": _least(updates, "ess"),
        "kl_k3_last": updates[-1].get("kl_k3"),
        "clipped_fraction_mean": mean_in(updates, "clipped_fraction"),
        "vetoed_fraction_mean": mean_in(updates, "vetoed_fraction"),
        "ratio_neg_min": _least(updates, "ratio_neg_min"),
        "grad_norm_max": max(values_in(updates, "grad_norm"), default=None),
        "reward_mean": mean_in(updates, "reward_mean"),
        "seconds_optimize": seconds.get("optimize", 0.0),
        "seconds_total": run.seconds,
    }


def as_csv(cells: Sequence[Cell], figures_by_cell: dict[str, Figures]) -> str:
    """One line for each cell: its name, its value of every setting that the grid varies (or empty), its figures."""
    keys = _keys(cells)
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["cell", *keys, *FIGURES])
    for cell in cells:
        figures = figures_by_cell[cell.name]
        settings = [text_of(cell.settings[key]) if key in cell.settings else "" for key in keys]
        lines.writerow([cell.name, *settings, *(_plain(figures.get(name)) for name in FIGURES)])
    return text.getvalue()


def as_table(sweep: Sweep, figures_by_cell: dict[str, Figures]) -> Table:
    """One row for each cell, in 80 columns: its settings and figures, or its state if it is not finished.

    The figures are accuracy or reward with its interval, ESS at the end, vetoed share and time.
    """
    keys = _keys(sweep.cells)
    finished = [figures for figures in figures_by_cell.values() if figures["state"] == "finished"]
    befores = [figures["before"] for figures in finished if figures["before"] is not None]
    measure = finished[0]["measure"] if finished else "accuracy"
    start = f", {format_value(befores[0], measure)} before" if befores else ""
    title = (
        f"Stage {sweep.stage} of {sweep.source.resolve().name}: {len(finished)} of {len(figures_by_cell)} cells{start}"
    )
    table = new_table(title)
    for key in keys:
        table.add_column(key.rpartition(".")[2], overflow="fold")
    for name in (f"{measure} (95 %)", "ESS", "vetoed", "time"):
        table.add_column(name, justify="right")
    best = max((figures["after"] for figures in finished if figures["after"] is not None), default=None)
    for cell in sweep.cells:
        figures = figures_by_cell[cell.name]
        settings = [text_of(cell.settings[key]) if key in cell.settings else "–" for key in keys]
        if figures["state"] != "finished":
            table.add_row(*settings, Text(figures["state"], style="red" if figures["state"] == "failed" else "dim"))
            continue
        interval = None if figures["low"] is None else (figures["low"], figures["high"])
        reached = f"{format_value(figures['after'], measure)} ({format_interval(interval, measure)})".replace(" ()", "")
        table.add_row(
            *settings,
            Text(reached, style="bold" if figures["after"] == best else ""),
            _percent(figures["ess_last"]),
            _percent(figures["vetoed_fraction_mean"]),
            duration(figures["seconds_optimize"]),
        )
    return table


def _keys(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(key for cell in cells for key in cell.settings))


def _least(rows: Sequence[Row], name: str) -> float | None:
    return min(values_in(rows, name), default=None)


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def _plain(value: object) -> object:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value
