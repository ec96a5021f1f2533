"""Collect the results of all runs in two small files: docs/study/cells.csv and docs/study/curves.json.

    python -m run_scripts.study.collect --out runs/study

A row of cells.csv is one finished cell. curves.json holds the evaluations and stages of each cell, and the update
metrics of those that are drawn update by update. Cells that the files already hold and that are not below --out are
kept if the grid still defines them the same way, so that a study can continue elsewhere (`run --kept docs/study`).
`python -m run_scripts.study.page` makes docs/study.md from the files.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.metrics import PHASES
from mugrpo_megatron.report.evaluations import problems_in
from mugrpo_megatron.report.rundata import RunData, read_run, seconds_by_phase
from run_scripts.study.grid import GRID, Grid, accuracies, cell_at, load_grid
from run_scripts.study.processes import CpuClock, read_cpu_clock
from run_scripts.study.results import DOCS, Results, cell_of, read_results
from run_scripts.study.run import AGAIN

CURVES_OF_UPDATES = ("reward_mean", "vetoed_fraction", "clipped_fraction", "ess", "entropy", "ratio_neg_max", "kl_k3")
DRAWN = ("headline", "one_stage", "scope")
"""Parts whose first seed is kept update by update."""
COLUMNS = (
    *("kind", "part", "variant", "mu", "rate", "seed", "updates", "problems"),
    *("accuracy_before", "accuracy", "low", "high"),
    *(f"{phase}_s" for phase in PHASES),
    *(f"{phase}_cpu_s" for phase in PHASES),
    *("wall_s", "cpu_s", "others_share"),
    *("vetoed", "clipped", "ess_min", "entropy_last", "zero_variance", "mismatch_mean", "reward_last", "tokens"),
)
"""`wall_s` and `cpu_s` are those of training: without start-up and evaluations. `optimize_s` excludes the saves inside
it, `optimize_cpu_s` includes them. `kind` is `study`, or one of `run.AGAIN` for a repeated run."""
KINDS = ("study", *AGAIN)


@dataclass(frozen=True, slots=True)
class Switches:
    """Seconds per stage by phase, medians over a run's stages; `switch` is everything except sampling and updates."""

    stages: int
    responses: float
    """Of one stage."""
    generate: float
    optimize: float
    """Without the saves inside it."""
    sync: float
    """Weights to the engine, including its wake-up."""
    score: float
    """Verification after generation has ended."""
    logprobs: float
    """The learner's log-probabilities, compared with the engine's."""
    save: float
    rest: float
    """Between the phases: putting the engine to sleep, reading the stage."""

    @property
    def switch(self) -> float:
        return self.sync + self.score + self.logprobs + self.save + self.rest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="where the study's results are")
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where cells.csv and curves.json go")
    parser.add_argument("--drop-kept", action="store_true", help="drop the kept cells that are not in --out")
    options = parser.parse_args(arguments)
    grid = load_grid(options.grid)
    rows, curves = collect(grid, options.out)
    if not options.drop_kept and (options.docs / "cells.csv").exists():
        rows, curves = keep(read_results(grid, options.docs), rows, curves)
    if len(starts := {row["accuracy_before"]: cell_of(row).name for row in rows}) > 1:
        found = "; ".join(f"{100 * accuracy:.2f} % before {name}" for accuracy, name in sorted(starts.items()))
        print(
            f"collect: these cells have different warm starts: {found}; --drop-kept drops those kept in --docs",
            file=sys.stderr,
        )
        return 2
    options.docs.mkdir(parents=True, exist_ok=True)
    with (options.docs / "cells.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(curve)}" for name, curve in sorted(curves.items()))
    (options.docs / "curves.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{len(rows)} cells into {options.docs}")
    return 0


def collect(grid: Grid, out: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows of cells.csv and the content of curves.json, of every finished cell below `out`."""
    part_of = grid.part_of()
    rows: list[Row] = []
    curves: dict[str, Any] = {}
    for kind in KINDS:
        root = out / kind if kind in AGAIN else out
        for cell in sorted(accuracies(grid, root)):
            directory = root / cell.name
            run, clock = read_run(directory), read_cpu_clock(directory)
            mu = grid.variants()[cell.variant].mu
            rows.append({"kind": kind, "part": part_of[cell.variant], "mu": mu, **row_of(run, clock)})
            drawn = cell.seed == 0 and part_of[cell.variant] in DRAWN
            curves[f"{kind}/{cell.name}"] = curve_of(run, clock, updates=drawn)
    return rows, curves


def keep(old: Results, rows: list[Row], curves: dict[str, Any]) -> tuple[list[Row], dict[str, Any]]:
    """`rows` and `curves`, plus those of `old` whose cells are not among them and whose variants have not changed."""
    known, part_of = old.grid.variants(), old.grid.part_of()
    found = {(row["kind"], cell_of(row)) for row in rows}
    kept = [
        row | {"part": part_of[row["variant"]]}
        for row in old.rows
        if (variant := known.get(row["variant"]))
        and (row["mu"], row["updates"]) == (variant.mu, variant.updates)
        and (row["kind"], cell_of(row)) not in found
    ]
    kept_curves = {f"{row['kind']}/{cell_of(row).name}": old.curve(row) for row in kept}
    return sorted(rows + kept, key=lambda row: (KINDS.index(row["kind"]), cell_of(row))), curves | kept_curves


def row_of(run: RunData, clock: CpuClock | None) -> Row:
    """One line of cells.csv."""
    cell = cell_at(run.path)
    first, last = run.evals[0], run.evals[-1]
    phases = dict.fromkeys(PHASES, 0.0) | seconds_by_phase(run.phases)
    phases["optimize"] -= sum(_overlap(save, other) for save, other in _pairs(run.phases, "save", "optimize"))
    tail = run.updates[-max(1, len(run.updates) // 16) :]
    return {
        "variant": cell.variant,
        "rate": cell.rate,
        "seed": cell.seed,
        "updates": len(run.updates),
        "problems": problems_in(last),
        "accuracy_before": _short(first["accuracy/mean"]),
        "accuracy": _short(last["accuracy/mean"]),
        "low": _short(last["low/mean"]),
        "high": _short(last["high/mean"]),
        **{f"{name}_s": round(seconds, 2) for name, seconds in phases.items()},
        **{f"{name}_cpu_s": None if clock is None else _cpu_of(run, clock, name) for name in PHASES},
        "wall_s": round(training_seconds(run, last["time"]), 2),
        "cpu_s": None if clock is None else round(training_cpu(run, clock, last["time"]), 2),
        "others_share": None if clock is None else round(clock.others_share(), 3),
        "vetoed": _mean(run.updates, "vetoed_fraction"),
        "clipped": _mean(run.updates, "clipped_fraction"),
        "ess_min": _short(min(row["ess"] for row in run.updates)),
        "entropy_last": _mean(tail, "entropy"),
        "zero_variance": _mean(run.stages, "zero_variance_fraction"),
        "mismatch_mean": _mean(run.stages, "mismatch_mean"),
        "reward_last": _short(run.stages[-1]["reward_mean"]),
        "tokens": round(sum(row["generated_tokens"] for row in run.stages)),
    }


def curve_of(run: RunData, clock: CpuClock | None, *, updates: bool) -> dict[str, Any]:
    """A cell's entry in curves.json.

    Evaluations as [update, wall, cpu, accuracy], stages as [first update, reward], the seconds of a switch, and each
    stage's generation as [responses, seconds]; with `updates` also phases as [name, start, end] and the update metrics.
    Seconds count from the end of start-up, without evaluations.
    """
    evals = [
        [
            row["update"],
            round(training_seconds(run, _begin_of(run, row)), 2),
            None if clock is None else round(training_cpu(run, clock, _begin_of(run, row)), 2),
            _short(row["accuracy/mean"]),
        ]
        for row in run.evals
    ]
    size = run.recipe["schedule"]["updates_per_stage"]
    curve: dict[str, Any] = {
        "evals": evals,
        "stages": [[row["stage"] * size, _short(row["reward_mean"])] for row in run.stages],
    }
    curve["switches"] = {name: _short(value) for name, value in asdict(switches(run)).items()}
    curve["generation"] = [[responses, _short(seconds)] for responses, seconds in generation_points(run)]
    if updates:
        curve["phases"] = [
            [row["phase"], *(round(training_seconds(run, row[end]), 2) for end in ("start", "end"))]
            for row in run.phases
            if row["phase"] not in ("eval", "start")
        ]
        curve["updates"] = {
            name: [None if row.get(name) is None else _short(row[name]) for row in run.updates]
            for name in CURVES_OF_UPDATES
        }
    return curve


def switches(run: RunData) -> Switches:
    """Seconds of the run's stages by phase."""
    names = ("generate", "optimize", "sync", "score", "logprobs", "save", "rest")
    per_stage: dict[str, list[float]] = {name: [] for name in names}
    for row in run.stages:
        own = [phase for phase in run.phases if phase["stage"] == row["stage"] and phase["phase"] != "start"]
        seconds = dict.fromkeys((*per_stage, "eval"), 0.0)
        for phase in own:
            seconds[phase["phase"]] += phase["end"] - phase["start"]
        seconds["optimize"] -= seconds["save"]
        span = max(phase["end"] for phase in own) - min(phase["start"] for phase in own)
        seconds["rest"] = span - sum(seconds.values())
        for name, values in per_stage.items():
            values.append(seconds[name])
    median = {name: statistics.median(values) for name, values in per_stage.items()}
    return Switches(len(run.stages), statistics.median(row["responses"] for row in run.stages), **median)


def generation_points(run: RunData) -> list[tuple[float, float]]:
    """(responses, seconds of generating them) of every stage."""
    seconds = {row["stage"]: row["end"] - row["start"] for row in run.phases if row["phase"] == "generate"}
    return [(row["responses"], seconds[row["stage"]]) for row in run.stages if row["stage"] in seconds]


def training_seconds(run: RunData, when: float) -> float:
    """Seconds of the run until the Unix time `when`, without start-up, evaluations and pauses between processes."""
    return run.clock(when) - sum(_until(row, when) for row in run.phases if row["phase"] in ("start", "eval"))


def training_cpu(run: RunData, clock: CpuClock, when: float) -> float:
    """`training_seconds` in processor seconds of all processes."""
    excluded = [row for row in run.phases if row["phase"] in ("start", "eval") and row["start"] < when]
    return (
        clock(when) - sum(clock(min(row["end"], when)) - clock(row["start"]) for row in excluded) - _imports(run, clock)
    )


def _imports(run: RunData, clock: CpuClock) -> float:
    """Processor seconds before the first phase: imports, which belong to start-up."""
    return clock(run.phases[0]["start"])


def _begin_of(run: RunData, row: Row) -> float:
    """When the evaluation that ended in `row` began."""
    starts = [phase["start"] for phase in run.phases if phase["phase"] == "eval" and phase["start"] <= row["time"]]
    return starts[-1]


def _until(row: Row, when: float) -> float:
    return max(0.0, min(row["end"], when) - row["start"])


def _cpu_of(run: RunData, clock: CpuClock, name: str) -> float:
    """Processor seconds of a phase. A phase shorter than the sampling interval gets its share of the interval."""
    return round(sum(clock(row["end"]) - clock(row["start"]) for row in run.phases if row["phase"] == name), 2)


def _pairs(phases: Sequence[Row], inner: str, outer: str) -> list[tuple[Row, Row]]:
    of = {name: [row for row in phases if row["phase"] == name] for name in (inner, outer)}
    return [(a, b) for a in of[inner] for b in of[outer]]


def _overlap(a: Row, b: Row) -> float:
    return max(0.0, min(a["end"], b["end"]) - max(a["start"], b["start"]))


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return _short(statistics.fmean(values)) if values else None


def _short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
