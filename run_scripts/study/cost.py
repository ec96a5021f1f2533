"""Where the time goes and what large stages save: measured on runs, and as a model for other machines.

    python -m run_scripts.study.cost runs/study/grpo/lr0.0004-seed0 runs/study/mu_grpo/lr0.0004-seed0

Of each run: what a stage costs besides generating and optimizing (the switch), and how generation time grows with the
stage's responses, `fixed + each * responses`, fitted over the stages of all runs given. Then the same formulas with the
figures of a 7B model on 4 H200 (`H200`): a prediction on paper.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from mugrpo_megatron.observe.rundata import RunData, read_run
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


@dataclass(frozen=True, slots=True)
class Machine:
    """One engine's decoding and one learner's training, with what turning from one to the other costs."""

    step_s: float
    """A decode step of an empty batch: reading the weights."""
    row_s: float
    """What each running response adds to a step."""
    running: int
    """Responses that decode together at most."""
    update_s: float
    switch_s: float
    """Weight sync, waking, sleeping, saving: once a stage."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run's seconds."""

    generate: float
    optimize: float
    switch: float
    occupancy: float
    """Mean share of the engine's places that decode while it generates."""

    @property
    def total(self) -> float:
        return self.generate + self.optimize + self.switch


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


def decode_seconds(lengths: Sequence[int], machine: Machine) -> tuple[float, float]:
    """(seconds, occupancy) of continuous batching: each of `running` places takes the next response when it is free.

    A step costs `step_s + row_s * rows that decode`; occupancy is the mean share of places in use.
    """
    ends: list[int] = []
    for length in lengths:
        begin = heapq.heappop(ends) if len(ends) == machine.running else 0
        heapq.heappush(ends, begin + int(length))
    steps = max(ends)
    rows = int(sum(int(length) for length in lengths))
    return steps * machine.step_s + rows * machine.row_s, rows / (steps * machine.running)


def predict(lengths: Sequence[int], machine: Machine, stages: int, updates: int) -> Prediction:
    """A run whose responses, in order, have these lengths: `stages` stages of equal size, `updates` in all."""
    parts = np.array_split(np.asarray(lengths), stages)
    generated = [decode_seconds(part.tolist(), machine) for part in parts]
    seconds = sum(s for s, _ in generated)
    occupancy = sum(s * o for s, o in generated) / seconds
    return Prediction(seconds, updates * machine.update_s, stages * machine.switch_s, occupancy)


def heavy_tail(count: int, mean: float, limit: int, sigma: float, seed: int = 0) -> np.ndarray:
    """int64 [count] response lengths: log-normal with that mean before they are cut at `limit`."""
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(draws, 1, limit).astype(np.int64)


def kv_tokens(memory_gb: float, resident_gb: float, bytes_per_token: int) -> int:
    """KV cache tokens that fit beside what is resident."""
    return max(0, int((memory_gb - resident_gb) * 1e9 / bytes_per_token))


SIGMAS = (0.0, 0.5, 1.0)
"""Spreads of log-normal response lengths that the prediction is made for."""
H200 = Machine(step_s=3.3e-3, row_s=13.5e-6, running=512, update_s=0.0, switch_s=10.0)
"""One of 4 H200 with Qwen2.5-7B in bfloat16. Reading the weights takes 3.3 ms a step; 25.6k, 38k and 50k tokens/s at
batches of 128, 256 and 512 with a context of 1,024 put 13.5 µs a row on top. The switch is assumed, not measured."""
H200_TRAINING_TOKENS_S = 18_600
"""Tokens that one H200 trains a second at 42.4 GFLOP a token and 790 TFLOP/s."""
H200_MEMORY_GB, KV_BYTES, WEIGHTS_GB, LEARNER_GB = 141.0, 57_344, 15.2, 15.2 + 30.5 / 4 + 91.4 / 4
"""Memory of one H200; KV cache of a token; weights of the engine; the learner's bfloat16 weights, and its float32
gradients and optimizer state over 4 data parallel ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run directories")
    options = parser.parse_args()
    runs = [read_run(path) for path in options.runs]
    if runs:
        named = [(f"{run.path.parent.name}/{run.path.name}", switches(run)) for run in runs]
        points = [point for run in runs for point in generation_points(run)]
        print(switches_table(named), generation_text(points), sep="\n\n", end="\n\n")
    print(prediction_table(), memory_table(), sep="\n\n")


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


def prediction_table() -> str:
    """GRPO (µ=4) and mu-GRPO (µ=1024) on 4 H200, for lengths with tails of different weight."""
    rows = []
    for sigma in SIGMAS:
        small, large = h200(sigma)
        for name, p in (("µ=4", small), ("µ=1024", large)):
            hours = (f"{seconds / 3600:.2f}" for seconds in (p.generate, p.optimize, p.switch, p.total))
            rows.append([f"{name}, σ={sigma:g}", *hours, f"{100 * p.occupancy:.0f}", f"{small.total / p.total:.2f}"])
    return markdown(("Run", "generate h", "optimize h", "switch h", "total h", "places in use %", "times faster"), rows)


def savings() -> tuple[float, float]:
    """Least and most times that mu-GRPO is faster in `prediction_table`."""
    ratios = [small.total / large.total for small, large in map(h200, SIGMAS)]
    return min(ratios), max(ratios)


@lru_cache
def h200(sigma: float, updates: int = 4096, per_update: int = 256, devices: int = 4) -> tuple[Prediction, Prediction]:
    """µ=4 and µ=1024 on `devices` H200, each with an engine of its own and its share of the responses."""
    lengths = heavy_tail(updates * per_update // devices, 1024, 8192, sigma)
    update_s = per_update * float(lengths.mean() + 256) / devices / H200_TRAINING_TOKENS_S
    machine = replace(H200, update_s=update_s)
    small, large = (predict(lengths, machine, stages, updates) for stages in (updates // 4, updates // 1024))
    return small, large


def memory_table(context: int = 2048) -> str:
    """How many responses of `context` tokens an H200's KV cache holds, with and without the learner in its memory."""
    usable = 0.9 * H200_MEMORY_GB
    rows = []
    for name, resident in (("learner asleep", WEIGHTS_GB), ("learner resident", WEIGHTS_GB + LEARNER_GB)):
        tokens = kv_tokens(usable, resident, KV_BYTES)
        rows.append([name, f"{resident:.0f}", f"{tokens:,}", f"{tokens // context:,}"])
    return markdown(("Memory", "Resident GB", "KV tokens", f"Responses of {context} tokens"), rows)


if __name__ == "__main__":
    main()
