"""The study's kept results in docs/study, the statistics of its page, and how it writes figures."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from mugrpo_megatron.evaluation.estimators import student
from run_scripts.study.cells import Cell, Outcome
from run_scripts.study.grid import GRID, Grid, load_grid
from run_scripts.study.search import Search, choose, tuned_rate

Row = dict[str, Any]
DOCS = Path(__file__).parents[2] / "docs" / "study"
CELLS, CURVES, SHORT, FIRST_DRAW = "cells.csv", "curves.csv", "short.csv", "first-draw.csv"
TEXT = {"method", "stage", "same_as", "commit", "objective", "veto"}
WHOLE = {
    *("seed", "repeat", "warm_start", "updates", "problems", "update", "seconds"),
    *("first_trigger", "stages", "rollout_seconds"),
}


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over n values; `half` is half of its 95 % interval (Student's t), None for a single value."""

    value: float
    half: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Results:
    """The rows of cells.csv and curves.csv, and their grid; part three's; and the replaced ones of a first draw."""

    grid: Grid
    rows: Sequence[Row]
    curves: Sequence[Row]
    short: Sequence[Row] = ()
    first_draw: Sequence[Row] = ()
    """Seed 0 at the regime rate on a stage that was lost; no figure of `rows` depends on them."""

    def outcomes(self) -> dict[Cell, Outcome]:
        return {cell_of(row): outcome_of(row) for row in self.rows}

    def tuned(self, method: str) -> Search:
        return tuned_rate(self.grid, self.outcomes(), method)

    def chosen(self, block: str) -> str | None:
        """The method of a block that runs only the best of another; None until it is chosen."""
        best = choose(self.grid, self.outcomes(), self.grid.blocks[block]).best
        return best.method if best else None

    def rate(self, block: str, method: str) -> float | None:
        """The rate of a method in a block; None for one that is not tuned yet."""
        fixed = self.grid.blocks[block].rate
        return self.tuned(method).rate if fixed is None else fixed

    def of(self, block: str, method: str) -> dict[int, Row]:
        """Seed -> the method's finished cell at the block's rate, of the block's seeds and of its draw at each.

        The method may be one of another block, to be shown next to the block's own.
        """
        rate, own = self.rate(block, method), self.grid.blocks[block]
        return {
            row["seed"]: row
            for row in self.rows
            if (row["method"], row["rate"]) == (method, rate)
            and row["seed"] in own.seeds
            and row["repeat"] == own.draw(row["seed"])
        }

    def column(self, block: str, method: str, name: str) -> dict[int, float]:
        """Seed -> a figure of the method's cells in a block."""
        return {seed: row[name] for seed, row in sorted(self.of(block, method).items()) if row[name] is not None}

    def starts(self, block: str, method: str) -> dict[int, tuple[int, float]]:
        """Seed -> its warm start: one that was made again answers another share of the test problems."""
        return {seed: (row["warm_start"], row["before"]) for seed, row in self.of(block, method).items()}

    def curve(self, row: Row) -> list[Row]:
        """The cell's rows of curves.csv; those of its twin, if it has the twin's figures."""
        key = (row["seed"], row["repeat"], row["same_as"] or row["method"], row["rate"])
        return [one for one in self.curves if (one["seed"], one["repeat"], one["method"], one["rate"]) == key]

    def complete(self, block: str, methods: Sequence[str]) -> list[int]:
        """The seeds at which all the methods have finished in a block."""
        found = [self.of(block, name) for name in methods]
        return [seed for seed in self.grid.blocks[block].seeds if all(seed in cells for cells in found)]


def read_results(grid: Grid, docs: Path = DOCS) -> Results:
    """The results in `docs`, none before anything was collected."""
    return Results(grid, *(read_rows(docs / name) for name in (CELLS, CURVES, SHORT, FIRST_DRAW)))


def read_named(name: str, docs: Path = DOCS) -> Results:
    """The results of the grid with this name, which have a directory of the same name in `docs`."""
    return read_results(load_grid(GRID.with_name(f"{name}.toml")), docs / name)


def read_kept(docs: Path) -> dict[Cell, tuple[str, Outcome]]:
    """Cell -> fingerprint of its stage, and outcome."""
    return {cell_of(row): (row["stage"], outcome_of(row)) for row in read_rows(docs / CELLS)}


def read_rows(path: Path) -> list[Row]:
    """The rows of a csv file with typed values, None for an empty number; no rows without the file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(file)]


def cell_of(row: Row) -> Cell:
    return Cell(row["seed"], row["method"], row["rate"], row["repeat"])


def outcome_of(row: Row) -> Outcome:
    return Outcome(row["before"], row["after"], row["problems"], row["ratio_neg_min"])


def mean_of(values: Sequence[float]) -> Mean:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("a mean needs a value")
    n = len(values)
    half = student(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Mean(statistics.fmean(values), half, n)


def differences(left: Mapping[int, float], right: Mapping[int, float]) -> list[float]:
    """left - right of every seed that both have."""
    return [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]


def sign_flip(values: Sequence[float], bound: float = 0.0) -> float:
    """One-sided p of "the mean is at most `bound`": the share of sign patterns whose mean is as high as the one seen.

    The patterns flip the signs of value - bound; there are 2**n of them, so p is at least 1 / 2**n. Raises ValueError
    without values.
    """
    if not values:
        raise ValueError("a test needs at least one value")
    above = [value - bound for value in values]
    seen = sum(above) - 1e-12  # rounding must not tell equal sums apart
    sums = [sum(signed) for signed in product(*((one, -one) for one in above))]
    return sum(one >= seen for one in sums) / len(sums)


def student_tail(values: Sequence[float], bound: float = 0.0) -> float | None:
    """One-sided p of "the mean is at most `bound`" by Student's t; None for fewer than two values or equal ones.

    The tail is the finite sum of Abramowitz & Stegun 26.7.3 and 26.7.4 for whole degrees of freedom.
    """
    freedom = len(values) - 1
    spread = statistics.stdev(values) if freedom > 0 else 0.0
    if not spread:
        return None
    angle = math.atan((statistics.fmean(values) - bound) / (spread / math.sqrt(len(values))) / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for place in range(freedom // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * place + 1 + odd) / (2 * place + 2 + odd)
    central = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return (1 - central) / 2


def holm(ps: Sequence[float]) -> list[float]:
    """The p values, corrected by Holm's method for their number."""
    order = sorted(range(len(ps)), key=lambda place: ps[place])
    corrected, least = [0.0] * len(ps), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = least
    return corrected


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns after the first are right-aligned."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def percent(mean: Mean) -> str:
    """`63.1 ± 1.2` with the half-width of the 95 % interval."""
    return f"{100 * mean.value:.1f}" + ("" if mean.half is None else f" ± {100 * mean.half:.1f}")


def points(mean: Mean | None, digits: int) -> str:
    """A difference of shares in points, with its sign."""
    return plain(None if mean is None else Mean(100 * mean.value, mean.half and 100 * mean.half, mean.n), digits)


def plain(mean: Mean | None, digits: int = 3) -> str:
    """A difference with its sign; `–` without a value."""
    if mean is None:
        return "–"
    return f"{mean.value:+.{digits}f}" + ("" if mean.half is None else f" ± {mean.half:.{digits}f}")


def scientific(number: float | None) -> str:
    """`1.6·10⁻⁴`, `10⁻⁵`; `–` for None."""
    if number is None:
        return "–"
    digits, exponent = f"{number:e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if float(digits) == 1 else f"{float(digits):g}·{power}"


def counted(number: int, what: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _value(key: str, text: str) -> Any:
    if key in TEXT:
        return text
    if not text:
        return None
    return int(text) if key in WHOLE else float(text)
