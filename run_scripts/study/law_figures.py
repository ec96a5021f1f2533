"""The law's figures, from cells.csv, law.csv and law_problems.csv: gaps beside nats, and gaps by the start's pass rate.

python -m run_scripts.study.law_figures    # prints the tables of docs/study/law.md
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_scripts.study.grid import Grid, load_grid
from run_scripts.study.law import CSV, PROBLEMS, REFERENCE, Z975
from run_scripts.study.results import CELLS, DOCS, Row, markdown, read_rows

RESPONSES = 64
"""Responses of an update, in every cell of the study."""
BINS = ((0.0, 0.05), (0.05, 0.3), (0.3, 1.0))
"""Pass rates of the warm start that E1 compares, each without its lower end except for the first."""
FRESH, FRESH_RATE = REFERENCE
STALE_RATE = 2e-5
"""The rate of E3's one stage."""


@dataclass(frozen=True, slots=True)
class Point:
    """One finished cell beside GRPO from the same warm start."""

    start: str
    """The law's warm start, or `study`."""
    method: str
    rate: float
    seed: int
    before: float
    """Greedy accuracy of the warm start."""
    gap: float
    """Points by which the cell ends below GRPO: greedy."""
    late: float
    """Nats a response, by the mean k3 over the run's last 64 updates."""
    phases: int
    row: Row

    @property
    def collapsed(self) -> bool:
        """Whether it ended below its warm start."""
        return bool(self.row["after"] < self.row["before"])


def study_points(rows: Sequence[Row], grid: Grid) -> list[Point]:
    """Every stale cell of cells.csv for which GRPO at its tuned rate has run as long, from as good a start of the seed.

    Cells that only repeat their twin's figures are left out.
    """
    fresh = {
        (row["seed"], row["before"], row["updates"]): row["after"]
        for row in rows
        if row["method"] in (FRESH, f"{FRESH}_long") and row["rate"] == FRESH_RATE
    }
    return [
        _point("study", row, fresh[key], grid.phases(row["method"]))
        for row in rows
        if not row["same_as"]
        and not row["method"].startswith(FRESH)
        and (key := (row["seed"], row["before"], row["updates"])) in fresh
    ]


def law_points(rows: Sequence[Row]) -> list[Point]:
    """Every stale cell of law.csv whose warm start has GRPO's cell."""
    fresh = {row["start"]: row["after"] for row in rows if (row["method"], row["rate"]) == (FRESH, FRESH_RATE)}
    stale = [row for row in rows if row["method"] != FRESH and row["start"] in fresh]
    return [_point(row["start"], row, fresh[row["start"]], row["stages"]) for row in stale]


def _point(start: str, row: Row, fresh: float, phases: int) -> Point:
    tokens = row["stage_tokens"] / (row["updates"] * RESPONSES)
    gap, late = 100 * (fresh - row["after"]), row["kl_k3_late"] * tokens
    return Point(start, row["method"], row["rate"], row["seed"], row["before"], gap, late, phases, row)


@dataclass(frozen=True, slots=True)
class Bin:
    """The test problems whose pass rate under the warm start lies in one bin, and the ends' sampled accuracy there."""

    low: float
    high: float
    problems: int
    start: float
    fresh: float
    stale: float
    half: float
    """Half of the 95 % interval of the gap, over problems."""

    @property
    def gap(self) -> float:
        return 100 * (self.fresh - self.stale)


def bins_of(rows: Sequence[Row], stale: tuple[str, float] = ("veto", STALE_RATE)) -> list[Bin]:
    """E1's bins; none before its three evaluations have finished."""
    passes = _passes(rows, "start")
    fresh = _passes([row for row in rows if (row["method"], row["rate"]) == (FRESH, FRESH_RATE)], "end")
    other = _passes([row for row in rows if (row["method"], row["rate"]) == stale], "end")
    return binned(passes, fresh, other) if passes and fresh and other else []


def binned(passes: Mapping[str, float], fresh: Mapping[str, float], stale: Mapping[str, float]) -> list[Bin]:
    """The bins that have a problem. Each mapping: problem -> sampled accuracy, of the warm start and the two ends."""
    bins = []
    for low, high in BINS:
        own = [name for name, share in passes.items() if low < share <= high or low == share == 0.0]
        if own:
            gaps = [fresh[name] - stale[name] for name in own]
            half = 100 * Z975 * statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
            start, ahead, behind = (statistics.fmean(shares[name] for name in own) for shares in (passes, fresh, stale))
            bins.append(Bin(low, high, len(own), start, ahead, behind, half))
    return bins


def _passes(rows: Iterable[Row], of: str) -> dict[str, float]:
    return {row["problem"]: row["right"] / row["samples"] for row in rows if row["of"] == of}


def left(row: Row) -> float:
    """The share of the warm start's sampled errors that the cell leaves."""
    return float((1 - row["sampled"]) / (1 - row["start_sampled"]))


def read(docs: Path = DOCS) -> tuple[list[Point], list[Row], list[Row]]:
    """The study's points, the rows of law.csv, and those of law_problems.csv."""
    grid = load_grid()
    return study_points(read_rows(docs / CELLS), grid), law_rows(docs / CSV), law_rows(docs / PROBLEMS)


def law_rows(path: Path) -> list[Row]:
    """The rows of one of the law's csv files: text, or a number where the text is one; none without the file."""
    return [{key: _value(key, text) for key, text in row.items()} for row in _text_rows(path)]


def _text_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _value(key: str, text: str) -> Any:
    if key in ("start", "problem", "of", "method", "stage", "same_as", "commit"):
        return text
    return float(text) if text else None


def tables(rows: Sequence[Row], problems: Sequence[Row]) -> str:
    """The figures of E1, E3 and E5 as Markdown."""
    return "\n\n".join((_e1(problems), _cells(rows)))


def _e1(problems: Sequence[Row]) -> str:
    head = ("p of the warm start", "Problems", "Start %", "GRPO %", "One stage %", "Gap, points")
    found = bins_of(problems)
    shown = [
        (
            f"{one.low:g} to {one.high:g}",
            str(one.problems),
            *(f"{100 * value:.1f}" for value in (one.start, one.fresh, one.stale)),
            f"{one.gap:+.1f} ± {one.half:.1f}",
        )
        for one in found
    ]
    return markdown(head, shown)


def _cells(rows: Sequence[Row]) -> str:
    head = (
        *("Start", "Cell", "Rate", "Stages", "Greedy %", "Sampled %", "Gap, greedy", "Gap, sampled"),
        *("Errors left", "Nats a stage: first, mean, last", "Sampling, s"),
    )
    fresh = {row["start"]: row for row in rows if (row["method"], row["rate"]) == (FRESH, FRESH_RATE)}
    return markdown(head, [_cell(row, fresh.get(row["start"])) for row in rows])


def _cell(row: Row, fresh: Row | None) -> list[str]:
    greedy = "–" if fresh is None or fresh is row else f"{100 * (fresh['after'] - row['after']):+.1f}"
    sampled = "–" if row["gap"] is None else f"{100 * row['gap']:+.1f} ± {100 * row['gap_half']:.1f}"

    def percent(before: float | None, after: float | None) -> str:
        return "–" if before is None or after is None else f"{100 * before:.1f} → {100 * after:.1f}"

    return [
        row["start"],
        row["method"],
        f"{row['rate']:g}",
        f"{row['stages']:.0f}",
        percent(row["before"], row["after"]),
        percent(row["start_sampled"], row["sampled"]),
        greedy,
        sampled,
        "–" if row["sampled"] is None or row["start_sampled"] is None else f"{left(row):.2f}",
        ", ".join(f"{row[name]:.2g}" for name in ("nats_first", "nats", "nats_last")),
        f"{row['rollout_seconds']:.0f}",
    ]


def main() -> int:
    _, rows, problems = read()
    print(tables(rows, problems))
    return 0


if __name__ == "__main__":
    sys.exit(main())
