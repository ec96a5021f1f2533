"""Stages whose responses have a heavy tail of lengths: decode steps counted, and the seconds that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mugrpo_megatron.data import arithmetic
from run_scripts.study.cost import decode_steps
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
    that an engine took stand next to the steps.
    """
    sizes: tuple[int, ...] = (1, 4, 16, 32, 128)
    if measured:
        updates, running = measured["updates"], measured["running"]
        sizes = tuple(sorted(map(int, measured["seconds"])))
    played = _played(updates, running, sizes)
    fewest, _ = _played(updates, running, [updates])[updates]
    rows = [
        [str(mu), f"{steps:,}", f"{steps / fewest:.2f}", f"{100 * occupancy:.0f}"]
        for mu, (steps, occupancy) in played.items()
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
    return {mu: (seconds[mu] / seconds[largest], steps / played[largest][0]) for mu, (steps, _) in played.items()}


def _played(updates: int, running: int, sizes: Iterable[int]) -> dict[int, tuple[int, float]]:
    """µ -> (decode steps, occupancy) of `updates` updates in stages of that µ; occupancy is the mean over all steps."""
    lengths = long_lengths(updates * PROMPTS)
    return {mu: _in_stages(lengths, mu * len(lengths) // updates, running) for mu in sizes}


def _in_stages(lengths: Sequence[int], size: int, running: int) -> tuple[int, float]:
    """(decode steps, occupancy) of stages of `size` responses, one after the other."""
    steps = sum(decode_steps(lengths[i : i + size], running)[0] for i in range(0, len(lengths), size))
    return steps, sum(lengths) / (steps * running)


def places_table(measured: Mapping[str, Any]) -> str:
    """Seconds of one large stage by the engine's places, as `run_scripts.study.stragglers` measured them."""
    median = {int(running): statistics.median(times) for running, times in measured["places"].items()}
    fastest = min(median.values())
    rows = [
        [f"{running:,}", f"{seconds:.1f}", f"{seconds / fastest:.2f}", f"{measured['tokens'] / seconds:,.0f}"]
        for running, seconds in sorted(median.items(), reverse=True)
    ]
    return markdown(("Places", "Seconds", "Of the fastest", "Tokens/s"), rows)
