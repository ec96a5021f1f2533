"""Where the time of finished runs went.

    python -m run_scripts.study.cost runs/study/grpo/lr0.0004-seed0 runs/study/mu_grpo/lr0.0004-seed0

For each run: what a stage costs besides generating and optimizing (the switch), and how generation time grows with the
stage's responses, `fixed + each * responses`, fitted over the stages of all runs given. Times of machines that nothing
was run on come from `mugrpo plan` alone.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mugrpo_megatron.report.rundata import RunData, read_run
from run_scripts.study.results import CLOCK, COMPARED, RESTART, Results, column
from run_scripts.study.stats import mean_of
from run_scripts.study.tables import markdown


@dataclass(frozen=True, slots=True)
class Switches:
    """Seconds per stage that are neither sampling nor updates, medians over a run's stages."""

    stages: int
    responses: float
    """Of one stage."""
    generate: float
    optimize: float
    """Without the saves inside it."""
    sync: float
    """Weights to the engine, the engine's waking included."""
    score: float
    """Verification that outlasts generation."""
    logprobs: float
    """The comparison of engine and learner."""
    save: float
    rest: float
    """Between the phases: the engine goes to sleep, the stage is read."""

    @property
    def switch(self) -> float:
        return self.sync + self.score + self.logprobs + self.save + self.rest


def switches(run: RunData) -> Switches:
    """What the run's stages cost apart from sampling and updates."""
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


def generation_fit(points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(fixed, each): seconds of a stage's generation = fixed + each * responses, least squares over `points`.

    Raises ValueError when all stages have the same number of responses.
    """
    responses, times = np.array(points, dtype=float).T
    if len(set(responses)) == 1:
        raise ValueError("a fit needs stages of different sizes: give runs with different mu")
    each, fixed = np.polyfit(responses, times, 1)
    return float(fixed), float(each)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    runs = [read_run(path) for path in parser.parse_args().runs]
    named = [(f"{run.path.parent.name}/{run.path.name}", switches(run)) for run in runs]
    points = [point for run in runs for point in generation_points(run)]
    print(switches_table(named), generation_text(points), sep="\n\n")


def switches_table(named: Sequence[tuple[str, Switches]]) -> str:
    """The switch of each run, part by part."""
    rows = []
    for name, s in named:
        parts = (s.generate, s.optimize, s.sync, s.score, s.logprobs, s.save, s.rest, s.switch)
        share = s.switch / (s.switch + s.generate + s.optimize)
        seconds = (f"{part:.3f}" for part in parts)
        rows.append([name, f"{s.stages:g}", f"{s.responses:g}", *seconds, f"{100 * share:.0f}"])
    head = ("Run", "Stages", "Responses", "generate", "optimize", "sync", "score", "logprobs", "save", "rest")
    return markdown((*head, "switch", "switch %"), rows)


def generation_text(points: Sequence[Sequence[float]]) -> str:
    """The fit in a sentence."""
    if len({responses for responses, _ in points}) < 2:
        return "Stages of one size alone: nothing to fit."
    fixed, each = generation_fit(points)
    return f"Generating a stage takes {fixed:.2f} s and {1e3 * each:.3f} ms a response (fit over {len(points)} stages)."


def kept_switches(results: Results) -> tuple[str, str]:
    """`switches_table` and `generation_text` of the first part's tuned runs with seed 0; empty without any."""
    found = [
        (variant.title, results.curve(results.timed(variant.name)[0]))
        for variant in results.grid.parts[0].variants
        if results.timed(variant.name)
    ]
    if not found:
        return "", ""
    points = [point for _, curve in found for point in curve["generation"]]
    return switches_table([(name, Switches(**curve["switches"])) for name, curve in found]), generation_text(points)


def restart_table(results: Results) -> str:
    """The same updates with an engine that sleeps between stages and with one that ends, means over runs; empty before
    any with one that ends."""
    titles, rows = results.grid.variants(), []
    for between, kind in (("sleeps", CLOCK), ("ends", RESTART)):
        runs = {name: results.timed(name, kind) for name in COMPARED}
        if not all(runs.values()):
            return ""
        totals = {name: mean_of(column(found, "wall_s")).value for name, found in runs.items()}
        for name, found in runs.items():
            each = [Switches(**results.curve(row)["switches"]) for row in found]
            switch = mean_of([one.switch for one in each]).value
            apart = f"{totals[COMPARED[0]] / totals[name]:.2f}"
            counts = (str(len(found)), f"{each[0].stages:g}", f"{switch:.2f}", f"{each[0].stages * switch:.0f}")
            rows.append([between, titles[name].title, *counts, f"{totals[name]:.1f}", apart])
    head = ("Between stages the engine", "Run", "Runs", "Stages", "A switch, s", "All, s", "Total s", "GRPO / this")
    return markdown(head, rows)


if __name__ == "__main__":
    main()
