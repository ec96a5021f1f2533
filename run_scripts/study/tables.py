"""The tables of the study's page, and the single figures in its sentences."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from run_scripts.study.findings import Finding
from run_scripts.study.grid import Block, Grid
from run_scripts.study.results import (
    Mean,
    Results,
    Row,
    counted,
    differences,
    markdown,
    mean_of,
    outcome_of,
    percent,
    points,
    scientific,
)

MISSING = "not measured yet"
FEW = 3
"""Over so few seeds, each from its own warm start, the interval of a level is that of the starts: it is not shown."""
UNKNOWN = 0.25
"""A difference whose interval reaches further than this to each side says nothing, and the tables say so."""
ORDER = (2, 1, 3, 4, 5)
"""The claims' order in their table: the one that asks whether staleness is cheap comes first."""
BATCH = 64
"""Responses of an update (8 problems x 8)."""

Entry = tuple[str, str]
"""(block, method)"""


def contrast_table(found: Sequence[Finding], grid: Grid) -> str:
    """Each claim over seeds and over warm starts: difference, corrected p, verdict; in `ORDER`."""
    rows = []
    for number in ORDER:
        one = found[number - 1]
        rows.append(
            [
                f"{number}. {one.contrast.claim}",
                rate_of(grid.blocks[one.contrast.block]),
                one.measured,
                f"{len(one.values)} of {grid.seeds}",
                _p(one.p),
                one.measured_by_start,
                str(len(one.starts)),
                _p(one.p_starts),
                reading(one),
            ]
        )
    head = ("Claim", "Rate", "By seed", "Seeds", "p", "By warm start", "Starts", "p", "Verdict")
    return markdown(head, rows)


def reading(finding: Finding) -> str:
    """The verdict, what it rests on, and whether the data point the other way."""
    if finding.depends_on_seeds:
        return f"{finding.verdict} if seeds count as independent"
    if finding.opposite and finding.verdict == "not shown":
        return f"{finding.verdict}; all of the interval is below the bound"
    return finding.verdict


def rate_of(block: Block) -> str:
    """The rate of a block's cells, in words where each method has its own."""
    return "tuned" if block.rate is None else scientific(block.rate)


def accuracy_table(results: Results, entries: Sequence[Entry]) -> str:
    """Accuracy at the blocks' rates and seeds: before, after, minus no veto, collapses.

    Methods without a finished cell are left out; empty without any.
    """
    rows = []
    for block, name in entries:
        after = results.column(block, name, "after")
        if not after:
            continue
        apart = differences(after, results.column(block, "none", "after")) if name != "none" else []
        rows.append(
            [
                results.grid.methods[name].title,
                scientific(results.rate(block, name)),
                level([*results.column(block, name, "before").values()]),
                level([*after.values()]),
                difference(apart) if apart else "–",
                collapsed(results, block, name),
            ]
        )
    head = ("Method", "Rate", "Before %", "After %", "Minus no veto, points", "Collapsed")
    return markdown(head, rows) if rows else ""


def price_table(results: Results, entries: Sequence[Entry], grpo: str) -> str:
    """Final accuracy at the blocks' rates and seeds, and minus GRPO's; empty without a finished cell."""
    rows = []
    for block, name in entries:
        after = results.column(block, name, "after")
        if not after:
            continue
        apart = differences(after, results.column(block, grpo, "after")) if name != grpo else []
        title, rate = results.grid.methods[name].title, scientific(results.rate(block, name))
        rows.append([title, rate, level([*after.values()]), difference(apart) if apart else "–"])
    return markdown(("Method", "Rate", "After %", "Minus GRPO, points"), rows) if rows else ""


def measures_table(results: Results, entries: Sequence[Entry]) -> str:
    """What the updates measured at the blocks' rates and seeds, means over seeds; empty without a finished cell."""
    rows = []
    for block, name in entries:
        cells = list(results.of(block, name).values())
        if not cells:
            continue
        first = [row["first_trigger"] for row in cells if row["first_trigger"] is not None]
        rows.append(
            [
                results.grid.methods[name].title,
                *(_mean(cells, column, 100, 2) for column in ("clipped_early", "clipped_late")),
                f"{per_response(cells, 'clipped_late'):.1f}",
                _mean(cells, "ratio_neg_late", 1, 3),
                f"{min(row['ratio_neg_min'] for row in cells):.1e}",
                f"{min(first)}" if first else "none",
                _mean(cells, "vetoed", 100, 2),
                f"{min(row['ess_min'] for row in cells):.1g}",
            ]
        )
    head = ("Method", "Clipped %, first 100", "last 64", "a response", "E[ρ, A < 0], last 64")
    rest = ("Least ρ, A < 0", "First trigger", "Vetoed %", "Least ESS")
    return markdown((*head, *rest), rows) if rows else ""


def ruin_table(results: Results, entries: Sequence[Entry]) -> str:
    """Runs at rates that are too high: where they end, minus no veto, collapses, and what the veto did."""
    rows = []
    for block, name in entries:
        after = results.column(block, name, "after")
        if not after:
            continue
        cells = list(results.of(block, name).values())
        apart = differences(after, results.column(block, "none", "after")) if name != "none" else []
        rows.append(
            [
                results.grid.methods[name].title,
                rate_of(results.grid.blocks[block]),
                level([*after.values()]),
                difference(apart) if apart else "–",
                collapsed(results, block, name),
                _mean(cells, "vetoed", 100, 2),
            ]
        )
    head = ("Method", "Rate", "After %", "Minus no veto, points", "Collapsed", "Vetoed %")
    return markdown(head, rows) if rows else ""


def gains_table(results: Results, block: str, methods: Sequence[str], every: int = 128) -> str:
    """Mean accuracy after every `every` updates of a block's methods, at the seeds that all of them have."""
    seeds, steps = results.complete(block, methods), range(0, results.grid.updates + 1, every)
    rows = []
    for name in methods:
        curves = [accuracies(results, row) for seed, row in results.of(block, name).items() if seed in seeds]
        if curves and all(curves):
            shown = [f"{100 * statistics.fmean(curve[one] for curve in curves):.1f}" for one in steps]
            rows.append([results.grid.methods[name].title, *shown])
    return markdown(("Accuracy % after updates", *map(str, steps)), rows) if rows else ""


def displacement_table(results: Results, methods: Sequence[str], sums: Sequence[float]) -> str:
    """Accuracy of the tuning seed where rate x updates reaches each of `sums`; empty without its curves."""
    rows = []
    for name in methods:
        for row in sorted(results.rows, key=lambda one: one["rate"]):
            if (row["seed"], row["method"]) != (results.grid.tuning_seed, name):
                continue
            curve = accuracies(results, row)
            shown = [curve.get(round(one / row["rate"])) for one in sums]
            if any(one is not None for one in shown):
                texts = ["–" if one is None else f"{100 * one:.1f}" for one in shown]
                rows.append([results.grid.methods[name].title, scientific(row["rate"]), *texts])
    head = ("Accuracy % where rate x updates is", "Rate", *map(scientific, sums))
    return markdown(head, rows) if rows else ""


def accuracies(results: Results, row: Row) -> Mapping[int, float]:
    """Update -> accuracy of a cell's curve."""
    return {one["update"]: one["accuracy"] for one in results.curve(row) if one["accuracy"] is not None}


def gap(results: Results, block: str, left: str, right: str) -> str:
    """The difference of two methods' final accuracies in a block."""
    return over_seeds(differences(*(results.column(block, name, "after") for name in (left, right))))


def over_seeds(apart: Sequence[float]) -> str:
    """The mean of differences of accuracies, seed by seed, and how many there are."""
    return f"{points(mean_of(apart), 1)} points over {counted(len(apart), 'seed')}" if apart else MISSING


def difference(apart: Sequence[float]) -> str:
    """A mean difference in points, or that its interval is too wide to say anything."""
    mean = mean_of(apart)
    return points(mean, 1) + (" (no information)" if mean.half is not None and mean.half > UNKNOWN else "")


def level(values: Sequence[float]) -> str:
    """A mean level in percent; with its interval over more than `FEW` seeds."""
    mean = mean_of(values)
    return percent(mean if mean.n > FEW else Mean(mean.value, None, mean.n))


def collapsed(results: Results, block: str, method: str) -> str:
    """How many runs of a method collapsed, of how many."""
    rows = list(results.of(block, method).values())
    return f"{sum(outcome_of(row).collapsed for row in rows)} of {len(rows)}" if rows else MISSING


def value(results: Results, block: str, method: str, column: str, scale: float, digits: int, unit: str) -> str:
    """The mean over seeds of a figure of a method's cells."""
    cells = [row for row in results.of(block, method).values() if row[column] is not None]
    return f"{_mean(cells, column, scale, digits)}{unit}" if cells else MISSING


def clipped_tokens(results: Results, block: str, method: str, column: str) -> str:
    """Clipped tokens of a response, mean over seeds."""
    cells = list(results.of(block, method).values())
    return f"{per_response(cells, column):.1f}" if cells else MISSING


def per_response(cells: Sequence[Row], column: str) -> float:
    """A share of tokens as tokens of a response."""
    return statistics.fmean(row[column] * row["stage_tokens"] / (row["updates"] * BATCH) for row in cells)


def first_draw(results: Results) -> str:
    """Final accuracies of the first draw's cells in %, in the order of the grid: `none 21.0, veto 43.8`."""
    after = {row["method"]: row["after"] for row in results.first_draw}
    return ", ".join(f"`{name}` {100 * after[name]:.1f}" for name in results.grid.methods if name in after)


def first_draw_gap(results: Results, left: str = "veto", right: str = "none") -> float | None:
    """One method's final accuracy minus another's in the first draw, in points."""
    after = {row["method"]: row["after"] for row in results.first_draw}
    return 100 * (after[left] - after[right]) if {left, right} <= after.keys() else None


def noise(results: Results) -> Mean | None:
    """Final accuracy of the repeated cell over its runs; None before there are two."""
    block = results.grid.blocks["noise"]
    key = (block.methods[0], block.rate, block.seeds[0])
    ends = [row["after"] for row in results.rows if (row["method"], row["rate"], row["seed"]) == key]
    return mean_of(ends) if len(ends) > 1 else None


def ran_again(results: Results) -> list[float]:
    """How far a cell's final accuracy moved when it ran a second time, from the same warm start and other responses."""
    first = {(row["seed"], row["method"], row["rate"]): row for row in results.rows if not row["repeat"]}
    pairs = [(row, first.get((row["seed"], row["method"], row["rate"]))) for row in results.rows if row["repeat"]]
    return [abs(row["after"] - one["after"]) for row, one in pairs if one and one["before"] == row["before"]]


def _p(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _mean(rows: Sequence[Row], column: str, scale: float, digits: int) -> str:
    values = [row[column] for row in rows if row[column] is not None]
    return f"{scale * statistics.fmean(values):.{digits}f}" if values else "–"
