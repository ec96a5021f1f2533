"""The study's tables of seconds: by phase, to the same accuracy, of a switch, of stragglers, and next to TRL."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.observe.metrics import PHASES
from run_scripts.study.collect import Switches
from run_scripts.study.grid import Cell
from run_scripts.study.results import (
    CLOCK,
    COMPARED,
    CPU,
    RESTART,
    WALL,
    Mean,
    Results,
    Row,
    arrival,
    column,
    difference,
    mean_of,
)
from run_scripts.study.tables import markdown, share

TIMED = tuple(phase for phase in PHASES if phase not in ("start", "eval"))
PROMPTS = 32
"""Problems of an update on the heavy-tailed task, 8 responses each."""


def same_accuracy(results: Results) -> float:
    """The accuracy that GRPO and mu-GRPO both reach: the lower of their means, less half a point."""
    return min(mean_of(list(results.by_seed(name).values())).value for name in COMPARED) - 0.005


def speed_claims(results: Results) -> str:
    """Wall-clock of mu-GRPO against GRPO, for the same updates and to the same accuracy."""
    rows = []
    level = same_accuracy(results)
    for kind, title in ((CLOCK, "engine sleeps between stages"), (RESTART, "engine ends between stages")):
        runs = [results.tuned(name, kind) for name in COMPARED]
        whole = [{row["seed"]: row["wall_s"] for row in side} for side in runs]
        rows.append(_timed("the same updates", title, whole, whole))
        rows.append(_timed("the same accuracy", title, [_arrivals(results, side, level) for side in runs], whole))
    return markdown(("Wall-clock of", "Setting", "GRPO / mu-GRPO", "Runs of GRPO, of mu-GRPO", "Verdict"), rows)


def _timed(what: str, title: str, seconds: Sequence[Mapping[int, float]], runs: Sequence[Sized]) -> tuple[str, ...]:
    """A row of `speed_claims`; `seconds` by seed of each side, and all `runs` of each side."""
    counts = ", ".join(f"{len(found)} of {len(every)}" for found, every in zip(seconds, runs, strict=True))
    if not all(seconds):
        return what, title, "–", counts, "open: a side never gets there"
    theirs, ours = (mean_of(list(found.values())).value for found in seconds)
    complete = all(len(found) == len(every) for found, every in zip(seconds, runs, strict=True))
    decided = speed_verdict(difference(*seconds)) if complete else "open: not every run gets there"
    return what, title, f"{theirs / ours:.2f}", counts, decided


def _arrivals(results: Results, runs: Sequence[Row], level: float) -> dict[int, float]:
    """Seed -> training seconds until the run first reaches `level`, for those that do."""
    found = {row["seed"]: arrival(results.curve(row)["evals"], level, WALL) for row in runs}
    return {seed: seconds for seed, seconds in found.items() if seconds is not None}


def speed_verdict(saved: Mean | None) -> str:
    """Whether mu-GRPO takes less time: the interval of the seconds it saves, seed by seed."""
    if saved is None:
        return "not measured"
    if saved.low is None or saved.high is None:
        return "open (one run a side)"
    return "holds" if saved.low > 0 else "does not hold" if saved.high < 0 else "open"


def phase_table(results: Results, unit: str = "s") -> str:
    """Seconds by phase of the first part's variants, means over their runs; `unit` "s" is wall-clock, "cpu_s" processor
    time of all processes."""
    rows = []
    for variant in results.grid.parts[0].variants:
        runs = results.tuned(variant.name, CLOCK)
        phases = [f"{mean_of(column(runs, f'{name}_{unit}')).value:.1f}" for name in TIMED]
        total = _seconds(runs, "wall_s" if unit == "s" else unit)
        rows.append([variant.title, str(len(runs)), *phases, total, share(runs, "others_share")])
    return markdown(("Variant", "Runs", *TIMED, "Total", "Machine used by others %"), rows)


def speed_table(results: Results) -> str:
    """Seconds to the same accuracy, and GRPO's seconds as a multiple of them."""
    level = same_accuracy(results)
    base = {axis: results.seconds_to("grpo", level, axis) for axis in (WALL, CPU)}
    rows = []
    for variant in results.grid.parts[0].variants:
        runs = results.tuned(variant.name, CLOCK)
        cells = []
        for axis in (WALL, CPU):
            times = results.seconds_to(variant.name, level, axis)
            cells.append(f"{mean_of(times).value:.1f}" if times else "never")
            ratio = mean_of(base[axis]).value / mean_of(times).value if times and base[axis] else None
            cells.append(f"{ratio:.2f}" if ratio else "–")
        reached = len(results.seconds_to(variant.name, level, WALL))
        rows.append([variant.title, f"{reached} of {len(runs)}", *cells])
    return markdown(("Variant", "Runs that reach it", "Wall s", "GRPO / this", "CPU s", "GRPO / this"), rows)


def most_of_others(results: Results) -> float:
    """Largest share of the processor time that other work used while a run's seconds were taken."""
    return max(row["others_share"] for row in results.of_kind(CLOCK))


def cpu_spread(runs: Sequence[Mapping[str, Any]], results: Results) -> tuple[float, float]:
    """Least and most processor seconds of the same work: our GRPO at any rate."""
    seconds = [run["points"][-1][2] for run in runs if run["side"].startswith("ours, grpo")]
    seconds += column((row for row in results.of_kind("study") if row["variant"] == "grpo"), "cpu_s")
    return min(seconds), max(seconds)


def switches_table(named: Sequence[tuple[str, Switches]]) -> str:
    """Seconds of each run's switch by phase."""
    rows = []
    for name, s in named:
        parts = (s.generate, s.optimize, s.sync, s.score, s.logprobs, s.save, s.rest, s.switch)
        share = s.switch / (s.switch + s.generate + s.optimize)
        seconds = (f"{part:.3f}" for part in parts)
        rows.append([name, f"{s.stages:g}", f"{s.responses:g}", *seconds, f"{100 * share:.0f}"])
    head = ("Run", "Stages", "Responses", "generate", "optimize", "sync", "score", "logprobs", "save", "rest")
    return markdown((*head, "switch", "switch %"), rows)


def generation_fit(points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(fixed, each): seconds of a stage's generation = fixed + each * responses, least squares over `points`.

    Raises ValueError when all stages have the same number of responses.
    """
    responses, times = np.array(points, dtype=float).T
    if len(set(responses)) == 1:
        raise ValueError("a fit needs stages of different sizes: give runs with different mu")
    each, fixed = np.polyfit(responses, times, 1)
    return float(fixed), float(each)


def generation_text(points: Sequence[Sequence[float]]) -> str:
    """The fit as a sentence."""
    fixed, each = generation_fit(points)
    return f"Generating a stage takes {fixed:.2f} s and {1e3 * each:.3f} ms a response (fit over {len(points)} stages)."


def kept_switches(results: Results) -> tuple[str, str]:
    """`switches_table` and `generation_text` of the first part's tuned runs with seed 0."""
    variants = results.grid.parts[0].variants
    found = [(variant.title, results.curve(results.tuned(variant.name, CLOCK)[0])) for variant in variants]
    points = [point for _, curve in found for point in curve["generation"]]
    return switches_table([(name, Switches(**curve["switches"])) for name, curve in found]), generation_text(points)


def restart_table(results: Results) -> str:
    """The same updates with an engine that sleeps between stages and with one that ends, means over runs."""
    titles, rows = results.grid.variants(), []
    for between, kind in (("sleeps", CLOCK), ("ends", RESTART)):
        runs = {name: results.tuned(name, kind) for name in COMPARED}
        totals = {name: mean_of(column(found, "wall_s")).value for name, found in runs.items()}
        for name, found in runs.items():
            each = [Switches(**results.curve(row)["switches"]) for row in found]
            switch = mean_of([one.switch for one in each]).value
            ratio = f"{totals[COMPARED[0]] / totals[name]:.2f}"
            counts = (str(len(found)), f"{each[0].stages:g}", f"{switch:.2f}", f"{each[0].stages * switch:.0f}")
            rows.append([between, titles[name].title, *counts, f"{totals[name]:.1f}", ratio])
    head = ("Between stages the engine", "Run", "Runs", "Stages", "A switch, s", "All, s", "Total s", "GRPO / this")
    return markdown(head, rows)


def decode_steps(lengths: Sequence[int], places: int) -> tuple[int, float]:
    """(steps, occupancy) of continuous batching: each of `places` places takes the next response when it is free.

    A step decodes one token of every running response; occupancy is the mean share of places in use.
    """
    ends: list[int] = []
    for length in lengths:
        begin = heapq.heappop(ends) if len(ends) == places else 0
        heapq.heappush(ends, begin + int(length))
    steps = max(ends)
    return steps, sum(int(length) for length in lengths) / (steps * places)


def long_lengths(count: int) -> list[int]:
    """Tokens of the right responses to `count` groups of 8 of the bundled task with a heavy tail, byte-level, in order.

    The answers of a model that has learned the task; no model is run.
    """
    asked = arithmetic.problems(0, "train", count, "arithmetic_long")
    return [len(arithmetic.demonstration(problem)) + 1 for problem in asked for _ in range(8)]


def straggler_table(measured: Mapping[str, Any]) -> str:
    """Decode steps, counted, and seconds of the same heavy-tailed responses by µ.

    `measured` is what `probes stragglers` wrote.
    """
    updates, median = measured["updates"], _medians(measured["seconds"])
    played, largest = _played(updates, measured["running"], {*median, updates}), max(median)
    rows = [
        [
            str(mu),
            f"{steps:,}",
            f"{steps / played[updates][0]:.2f}",
            f"{100 * occupancy:.0f}",
            f"{median[mu]:.1f}",
            f"{median[mu] / median[largest]:.2f}",
            f"{measured['tokens'] / median[mu]:,.0f}",
        ]
        for mu, (steps, occupancy) in ((mu, played[mu]) for mu in median)
    ]
    head = ("µ", "Decode steps", "Of one stage's", "Places in use %", "Seconds", f"Of µ={largest}", "Tokens/s")
    return markdown(head, rows)


def straggler_cost(measured: Mapping[str, Any]) -> dict[int, tuple[float, float]]:
    """µ -> (seconds, decode steps) as multiples of those of the largest µ."""
    seconds = _medians(measured["seconds"])
    played, largest = _played(measured["updates"], measured["running"], seconds), max(seconds)
    return {mu: (seconds[mu] / seconds[largest], steps / played[largest][0]) for mu, (steps, _) in played.items()}


def _medians(rounds: Mapping[str, Sequence[float]]) -> dict[int, float]:
    """Median of the rounds by µ or by places, ascending."""
    return {number: statistics.median(rounds[str(number)]) for number in sorted(map(int, rounds))}


def _played(updates: int, running: int, sizes: Iterable[int]) -> dict[int, tuple[int, float]]:
    """µ -> (decode steps, occupancy) of `updates` updates in stages of that µ; occupancy is the mean over all steps."""
    lengths = long_lengths(updates * PROMPTS)
    return {mu: _in_stages(lengths, mu * len(lengths) // updates, running) for mu in sizes}


def _in_stages(lengths: Sequence[int], size: int, running: int) -> tuple[int, float]:
    """(decode steps, occupancy) of stages of `size` responses, one after the other."""
    steps = sum(decode_steps(lengths[i : i + size], running)[0] for i in range(0, len(lengths), size))
    return steps, sum(lengths) / (steps * running)


def places_table(measured: Mapping[str, Any]) -> str:
    """Seconds of one large stage by the engine's places; `measured` is what `probes stragglers` wrote."""
    median = _medians(measured["places"])
    fastest = min(median.values())
    rows = [
        [f"{running:,}", f"{seconds:.1f}", f"{seconds / fastest:.2f}", f"{measured['tokens'] / seconds:,.0f}"]
        for running, seconds in sorted(median.items(), reverse=True)
    ]
    return markdown(("Places", "Seconds", "Of the fastest", "Tokens/s"), rows)


def trl_table(runs: Sequence[Mapping[str, Any]], results: Results | None = None) -> str:
    """Runs of the TRL bench; with `results`, also the study's own runs at the same rates, seed 0."""
    sides = [(run["side"], run["rate"], run["points"]) for run in runs]
    for rate in sorted({run["rate"] for run in runs}):
        for name in COMPARED:
            key = f"study/{Cell(name, rate, 0).name}"
            if results and key in results.curves:
                sides.append((f"ours, {results.grid.variants()[name].title}", rate, results.curves[key]["evals"]))
    rows = []
    for side, rate, points_ in sorted(sides, key=lambda side: side[1]):
        first, *_, last = points_
        rows.append([side, f"{rate:g}", f"{100 * first[3]:.1f}", f"{100 * last[3]:.1f}", *_tenths(last[1:3])])
    return markdown(("Side", "Rate", "Before %", "After %", "Wall s", "CPU s"), rows)


def trl_clock_table(runs: Sequence[Mapping[str, Any]], goal: float) -> str:
    """Runs of the TRL bench on a quiet machine, and when each reached the accuracy `goal`."""
    rows = []
    for run in sorted(runs, key=lambda run: run["points"][-1][WALL]):
        last = run["points"][-1]
        to_goal = [arrival(run["points"], goal, axis) for axis in (WALL, CPU)]
        rows.append([run["side"], f"{100 * last[3]:.1f}", *_tenths(last[1:3]), *_tenths(to_goal)])
    title = f"{100 * goal:.0f} %"
    return markdown(("Side", "After %", "Wall s", "CPU s", f"Wall s to {title}", f"CPU s to {title}"), rows)


def trl_gap(runs: Sequence[Mapping[str, Any]], results: Results) -> float:
    """Largest difference, in points, between the final accuracies of TRL and of our GRPO at the same rate."""
    ours = {run["rate"]: run["points"][-1][3] for run in runs if run["side"].startswith("ours, grpo")}
    ours = {cell.rate: a for cell, a in results.accuracies().items() if (cell.variant, cell.seed) == ("grpo", 0)} | ours
    theirs = {run["rate"]: run["points"][-1][3] for run in runs if run["side"].startswith("TRL")}
    return max(100 * abs(ours[rate] - theirs[rate]) for rate in ours.keys() & theirs.keys())


def _tenths(times: Sequence[float | None]) -> list[str]:
    return ["–" if seconds is None else f"{seconds:.1f}" for seconds in times]


def _seconds(runs: Sequence[dict[str, float]], name: str) -> str:
    values = column(runs, name)
    if not values:
        return "–"
    mean = mean_of(values)
    return f"{mean.value:.1f}" + ("" if mean.half is None else f" ± {mean.half:.1f}")
