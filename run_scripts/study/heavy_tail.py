"""Stages whose responses have a heavy tail of lengths: decode steps counted, and the seconds that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from mugrpo_megatron.data import arithmetic
from run_scripts.study.cost import Machine, Prediction, predict
from run_scripts.study.tables import markdown

PROMPTS = 32
"""Problems of an update on the heavy-tailed task, 8 responses each."""


def long_lengths(count: int) -> list[int]:
    """Tokens of the right responses to `count` groups of 8 of the bundled task with a heavy tail, byte-level, in order.

    What a model that has learned the task would answer: no model is asked.
    """
    asked = arithmetic.problems(0, "train", count, "arithmetic_long")
    return [len(arithmetic.demonstration(problem)) + 1 for problem in asked for _ in range(8)]


def straggler_table(measured: Mapping[str, Any] | None = None, updates: int = 128, running: int = 1024) -> str:
    """Decode steps of `updates` updates on the heavy-tailed bundled task by µ, all stages' batches played through.

    `measured` is what `run_scripts.study.stragglers` wrote: then its updates, places and µ are taken, and the seconds
    that an engine took stand beside the steps.
    """
    sizes = (1, 4, 16, 32, 128)
    if measured:
        updates, running = measured["updates"], measured["running"]
        sizes = tuple(sorted(map(int, measured["seconds"])))
    played = _played(updates, running, sizes)
    fewest = _played(updates, running, [updates])[updates].generate
    rows = [
        [str(mu), f"{p.generate:,.0f}", f"{p.generate / fewest:.2f}", f"{100 * p.occupancy:.0f}"]
        for mu, p in played.items()
    ]
    head = ["µ", "Decode steps", "Of one stage's", "Places in use %"]
    if measured:
        median = {int(mu): statistics.median(seconds) for mu, seconds in measured["seconds"].items()}
        head += ["Seconds", f"Of µ={sizes[-1]}", "Tokens/s"]
        for row, mu in zip(rows, sizes, strict=True):
            ratio, rate = median[mu] / median[sizes[-1]], measured["tokens"] / median[mu]
            row += [f"{median[mu]:.1f}", f"{ratio:.2f}", f"{rate:,.0f}"]
    return markdown(head, rows)


def straggler_cost(measured: Mapping[str, Any]) -> dict[int, tuple[float, float]]:
    """µ -> (seconds, decode steps) as multiples of those of the largest µ."""
    seconds = {int(mu): statistics.median(times) for mu, times in measured["seconds"].items()}
    played, largest = _played(measured["updates"], measured["running"], sorted(seconds)), max(seconds)
    return {mu: (seconds[mu] / seconds[largest], p.generate / played[largest].generate) for mu, p in played.items()}


def _played(updates: int, running: int, sizes: Iterable[int]) -> dict[int, Prediction]:
    """All batches of `updates` updates in stages of each of the given µ; a decode step counts as a second."""
    lengths = long_lengths(updates * PROMPTS)
    machine = Machine(step_s=1.0, row_s=0.0, running=running, update_s=0.0, switch_s=0.0)
    return {mu: predict(lengths, machine, updates // mu, updates) for mu in sizes}


def places_table(measured: Mapping[str, Any]) -> str:
    """Seconds of one large stage by the engine's places, as `run_scripts.study.stragglers` measured them."""
    median = {int(running): statistics.median(times) for running, times in measured["places"].items()}
    fastest = min(median.values())
    rows = [
        [f"{running:,}", f"{seconds:.1f}", f"{seconds / fastest:.2f}", f"{measured['tokens'] / seconds:,.0f}"]
        for running, seconds in sorted(median.items(), reverse=True)
    ]
    return markdown(("Places", "Seconds", "Of the fastest", "Tokens/s"), rows)
