"""The tables of the study's page, and the single figures in its sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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


def contrast_table(found: Sequence[Finding], grid: Grid) -> str:
    """Claim, rate, measured difference, corrected p, verdict."""
    rows = []
    for number, one in enumerate(found, 1):
        p = "–" if one.p is None else f"{one.p:.3f}"
        count = f"{len(one.values)} of {grid.seeds}"
        rows.append(
            [
                f"{number}. {one.contrast.claim}",
                rate_of(grid.blocks[one.contrast.block]),
                one.measured,
                count,
                one.contrast.family,
                p,
                one.verdict,
            ]
        )
    head = ("Claim", "Rate", "Difference", "Seeds", "Part", "p, corrected in its part", "Verdict")
    return markdown(head, rows)


def rate_of(block: Block) -> str:
    """The rate of a block's cells, in words where each method has its own."""
    return "tuned" if block.rate is None else scientific(block.rate)


def accuracy_table(results: Results, block: str, methods: Sequence[str], against: str = "none") -> str:
    """Accuracy at a block's rates and seeds: before, after, minus the method `against`, collapses, truncated responses.

    Methods without a finished cell are left out; empty without any.
    """
    rows = []
    for name in methods:
        after = results.column(block, name, "after")
        if not after:
            continue
        apart = differences(after, results.column(block, against, "after")) if name != against else []
        rows.append(
            [
                results.grid.methods[name].title,
                scientific(results.rate(block, name)),
                _seeds(results, block, name),
                percent(mean_of(list(results.column(block, name, "before").values()))),
                percent(mean_of(list(after.values()))),
                points(mean_of(apart), 1) if apart else "–",
                collapsed(results, block, name),
                percent(mean_of(list(results.column(block, name, "truncated_after").values()))),
            ]
        )
    other = {"none": "no veto", "grpo": "GRPO", "grpo_long": "GRPO"}[against]
    head = ("Method", "Rate", "Seeds", "Before %", "After %", f"Minus {other}, points", "Collapsed", "Truncated %")
    return markdown(head, rows) if rows else ""


def measures_table(results: Results, block: str, methods: Sequence[str]) -> str:
    """What the updates measured at a block's rates and seeds, means over seeds; empty without a finished cell."""
    rows = []
    for name in methods:
        cells = list(results.of(block, name).values())
        if not cells:
            continue
        first = [row["first_trigger"] for row in cells if row["first_trigger"] is not None]
        rows.append(
            [
                results.grid.methods[name].title,
                *(_mean(cells, column, 100, 2) for column in ("clipped_early", "clipped_late")),
                *(_mean(cells, column, 1, 3) for column in ("ratio_neg_early", "ratio_neg_late")),
                f"{min(row['ratio_neg_min'] for row in cells):.1e}",
                f"{min(first)}" if first else "none",
                _mean(cells, "vetoed", 100, 2),
                f"{min(row['ess_min'] for row in cells):.1g}",
                _mean(cells, "entropy_late", 1, 3),
            ]
        )
    head = ("Method", "Clipped %, first 100", "Clipped %, last 64", "E[ρ, A < 0], first 100", "E[ρ, A < 0], last 64")
    rest = ("Least ρ, A < 0", "First trigger", "Vetoed %", "Least ESS", "Entropy")
    return markdown((*head, *rest), rows) if rows else ""


def price_table(results: Results, methods: Sequence[str]) -> str:
    """The price of staleness: final accuracy by µ, minus GRPO's, on the seeds of the schedules."""
    rows = []
    for name in methods:
        after = results.column("schedules", name, "after")
        apart = differences(after, results.column("schedules", "grpo", "after")) if name != "grpo" else []
        rows.append(
            [
                str(results.grid.methods[name].mu),
                str(results.grid.phases(name)),
                results.grid.methods[name].title,
                scientific(results.rate("schedules", name)),
                str(len(after)),
                percent(mean_of(list(after.values()))) if after else "–",
                points(mean_of(apart), 1) if apart else "–",
            ]
        )
    return markdown(("µ", "Generations", "Method", "Rate", "Seeds", "After %", "Minus GRPO, points"), rows)


def tuning_table(results: Results) -> str:
    """Validation accuracy of the warm start and at every rate that was tried, the tuned one in bold.

    Empty before tuning. Methods that were tuned on different machines have different warm starts.
    """
    seed, rows = results.grid.tuning_seed, []
    tried = sorted({row["rate"] for row in results.rows if row["seed"] == seed})
    for name, method in results.grid.methods.items():
        own = {row["rate"]: row for row in results.rows if (row["seed"], row["method"]) == (seed, name)}
        if own:
            best = results.tuned(name).rate
            shown = {rate: f"{'**' if rate == best else ''}{100 * own[rate]['after']:.1f}" for rate in own}
            before = " / ".join(f"{100 * value:.1f}" for value in sorted({row["before"] for row in own.values()}))
            rows.append([method.title, before, *(shown.get(r, "–") + ("**" if r == best else "") for r in tried)])
    return markdown(("Method", "Before", *map(scientific, tried)), rows) if rows else ""


def tuned_and_regime(results: Results, method: str) -> str:
    """A method's validation accuracy at its best rate so far and at the regime rate, on the tuning seed."""
    seed, regime = results.grid.tuning_seed, results.grid.blocks["regime"].rate
    found = {row["rate"]: row["after"] for row in results.rows if (row["seed"], row["method"]) == (seed, method)}
    if regime not in found:
        return MISSING
    best = max(found, key=lambda rate: (found[rate], -rate))
    return ", ".join(f"{100 * found[rate]:.1f} % at {scientific(rate)}" for rate in dict.fromkeys((best, regime)))


def gap(results: Results, block: str, left: str, right: str) -> str:
    """The difference of two methods' final accuracies in a block."""
    return over_seeds(differences(*(results.column(block, name, "after") for name in (left, right))))


def over_seeds(apart: Sequence[float]) -> str:
    """The mean of differences of accuracies, seed by seed, and how many there are."""
    return f"{points(mean_of(apart), 1)} points over {counted(len(apart), 'seed')}" if apart else MISSING


def collapsed(results: Results, block: str, method: str) -> str:
    """How many runs of a method collapsed, of how many."""
    rows = list(results.of(block, method).values())
    return f"{sum(outcome_of(row).collapsed for row in rows)} of {len(rows)}" if rows else MISSING


def value(results: Results, block: str, method: str, column: str, scale: float, digits: int, unit: str) -> str:
    """The mean over seeds of a figure of a method's cells."""
    cells = [row for row in results.of(block, method).values() if row[column] is not None]
    return f"{_mean(cells, column, scale, digits)}{unit}" if cells else MISSING


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


def warm_starts(results: Results) -> int:
    """From how many warm starts the cells of the first four claims began: those made again answer another share."""
    cells = [row for name in ("tuned", "hot_pair") for row in results.of(name, "veto").values()]
    return len({(row["warm_start"], row["before"]) for row in cells})


def _seeds(results: Results, block: str, method: str) -> str:
    """How many seeds a method has; and how many of them did not run, because they have another method's figures."""
    cells = results.of(block, method).values()
    twins = sum(bool(row["same_as"]) for row in cells)
    return f"{len(cells)}" + (f" ({twins} equal to the run without a veto)" if twins else "")


def _mean(rows: Sequence[Row], column: str, scale: float, digits: int) -> str:
    values = [row[column] for row in rows if row[column] is not None]
    return f"{scale * statistics.fmean(values):.{digits}f}" if values else "–"
