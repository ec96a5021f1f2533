"""The study's kept results in docs/study, and the statistics of the page."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run_scripts.study.grid import Cell, Grid, best_rate

Row = dict[str, Any]
DOCS = Path(__file__).parents[2] / "docs" / "study"
TEXT = {"kind", "part", "variant"}
UPDATE, WALL, CPU = 0, 1, 2
"""Indices into an evaluation of curves.json."""
INSIDE = "inside.json"
"""The file that `probes inside` writes next to cells.csv."""
CLOCK, RESTART = "clock", "restart"
"""Kinds of runs repeated for their wall-clock: unchanged, and with an engine that ends between stages."""
COMPARED = ("grpo", "mu_grpo")
"""The variants whose wall-clock is compared."""


T975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantile of Student's t by degrees of freedom."""
Z975 = 1.96


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over n values; `half` is half of its 95 % interval (Student's t), None for a single value."""

    value: float
    half: float | None
    n: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.value - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.value + self.half


@dataclass(frozen=True, slots=True)
class Results:
    """cells.csv and curves.json, and their grid."""

    grid: Grid
    rows: list[Row]
    curves: dict[str, Any]
    inside: dict[str, list[list[float]]] = field(default_factory=dict)
    """Cell -> its accuracies inside its only stage, [updates, accuracy]."""

    def accuracies(self) -> dict[Cell, float]:
        return {cell_of(row): row["accuracy"] for row in self.of_kind("study")}

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    def at_rates(self, variant: str) -> dict[float, float]:
        """Final accuracy of the first seed at each rate that has run."""
        return {c.rate: accuracy for c, accuracy in self.accuracies().items() if (c.variant, c.seed) == (variant, 0)}

    def tried(self, variant: str) -> dict[float, float]:
        """`at_rates` of the rates that variants are tuned on."""
        return {rate: accuracy for rate, accuracy in self.at_rates(variant).items() if rate in self.grid.rates}

    def at(self, variant: str, rate: float) -> dict[int, float]:
        """Final accuracy of every seed at a rate."""
        return {c.seed: accuracy for c, accuracy in self.accuracies().items() if (c.variant, c.rate) == (variant, rate)}

    def is_tuned(self, variant: str) -> bool:
        return best_rate(self.grid, variant, self.accuracies()) is not None

    def rate(self, variant: str) -> float | None:
        """The tuned rate, or the best of those tried so far; None before any."""
        tried = self.tried(variant)
        return max(tried, key=lambda rate: (tried[rate], -rate), default=None)

    def tuned(self, variant: str, kind: str = "study") -> list[Row]:
        """The variant's runs at its tuned rate, by seed."""
        rate = self.rate(variant)
        found = [row for row in self.of_kind(kind) if row["variant"] == variant and row["rate"] == rate]
        return sorted(found, key=lambda row: row["seed"])

    def mean(self, variant: str, column: str = "accuracy") -> Mean | None:
        values = [row[column] for row in self.tuned(variant) if row[column] is not None]
        return mean_of(values) if values else None

    def by_seed(self, variant: str, column: str = "accuracy") -> dict[int, float]:
        return {row["seed"]: row[column] for row in self.tuned(variant)}

    def curve(self, row: Row) -> dict[str, Any]:
        return self.curves[f"{row['kind']}/{cell_of(row).name}"]

    def inside_of(self, variant: str) -> list[list[list[float]]]:
        """`inside` of the variant's cells, seed by seed."""
        return [points for cell, points in self.inside.items() if cell.startswith(f"{variant}/")]

    def repeats(self) -> list[list[float]]:
        """Final accuracies of cells that ran more than once, cell by cell: the same settings and the same seed."""
        found: dict[Cell, list[float]] = {}
        for row in self.rows:
            found.setdefault(cell_of(row), []).append(row["accuracy"])
        return [accuracies for accuracies in found.values() if len(accuracies) > 1]

    def seconds_to(self, variant: str, level: float, axis: int, kind: str = CLOCK) -> list[float]:
        """Training seconds until a run first reaches `level`, for those that do; `axis` is WALL or CPU."""
        times = (arrival(self.curve(row)["evals"], level, axis) for row in self.tuned(variant, kind))
        return [seconds for seconds in times if seconds is not None]


def read_results(grid: Grid, docs: Path) -> Results:
    """Raises FileNotFoundError before anything was collected."""
    with (docs / "cells.csv").open(newline="", encoding="utf-8") as file:
        rows = [{key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(file)]
    curves = json.loads((docs / "curves.json").read_text(encoding="utf-8"))
    inside = docs / INSIDE
    return Results(grid, rows, curves, json.loads(inside.read_text(encoding="utf-8")) if inside.exists() else {})


def cell_of(row: Row) -> Cell:
    return Cell(row["variant"], row["rate"], row["seed"])


def column(rows: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row[name] is not None]


def arrival(evals: Sequence[Sequence[Any]], level: float, axis: int) -> float | None:
    """Where on `axis`, WALL or CPU, the evaluations of a run first come up to `level`; None if they never do."""
    known = [point for point in evals if point[axis] is not None]
    return reached([point[axis] for point in known], [point[3] for point in known], level)


def mean_curve(curves: Sequence[Sequence[Sequence[float]]], axis: int) -> tuple[list[float], list[Mean]]:
    """Points of several runs of one variant, one by one: mean place on `axis`, and accuracy, which comes last."""
    points = list(zip(*curves, strict=False))
    xs = [sum(point[axis] for point in same) / len(same) for same in points]
    return xs, [mean_of([point[-1] for point in same]) for same in points]


def mean_of(values: Sequence[float]) -> Mean:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("a mean needs at least one value")
    n = len(values)
    if n == 1:
        return Mean(values[0], None, 1)
    quantile = T975[n - 1] if n - 1 < len(T975) else Z975
    return Mean(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(n), n)


def difference(left: Mapping[int, float], right: Mapping[int, float]) -> Mean | None:
    """Mean of left - right over the seeds that both have; None where they share none."""
    shared = sorted(left.keys() & right.keys())
    return mean_of([left[seed] - right[seed] for seed in shared]) if shared else None


def pooled_deviation(groups: Iterable[Sequence[float]]) -> float | None:
    """Standard deviation inside groups, pooled over all that have two values or more; None without any."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    squares = sum((value - statistics.fmean(group)) ** 2 for group in several for value in group)
    return math.sqrt(squares / freedom) if several else None


def fisher_exact(left: tuple[int, int], right: tuple[int, int]) -> float:
    """Two-sided p of Fisher's exact test for (events, trials): all outcomes at most as likely as this one."""
    (events, trials), (others, rest) = left, right
    total = events + others

    def ways(count: int) -> int:
        return math.comb(trials, count) * math.comb(rest, total - count)

    possible = [ways(count) for count in range(max(0, total - rest), min(trials, total) + 1)]
    return sum(one for one in possible if one <= ways(events)) / sum(possible)


def reached(xs: Sequence[float], ys: Sequence[float], level: float) -> float | None:
    """The x at which the polyline through the points first reaches `level`; None if it never does."""
    if ys and ys[0] >= level:
        return xs[0]
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False):
        if y0 < level <= y1:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None


def _value(key: str, text: str) -> Any:
    if key in TEXT:
        return text
    if not text:
        return None
    return int(text) if key in ("mu", "seed", "updates", "problems", "tokens") else float(text)
