#!/usr/bin/env python
"""How long engines idle and how full micro-batches are when response lengths have a heavy tail.

    .venv/bin/python run_scripts/bench/balance.py

Simulates a stage: engines decode up to `--slots` groups together, a token a step, and a group takes as many steps as
its longest response. Lengths are log-normal, cut at the limit. The queue is the one that runs use. The static split
gives every engine the same number of groups in advance. Packing is the learner's own.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.extras.plan.lengths import Supply, decode
from mugrpo_megatron.learner.packing import plan

Take = Callable[[int, int], list[int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What generating one stage took, in decoding steps."""

    makespan: float
    idle: float
    """Share of engine time between an engine's last response and the stage's end."""
    empty: float
    """Share of slot time without a response, the tail of every engine included."""


def lengths(responses: int, limit: int, median: float, sigma: float, generator: np.random.Generator) -> np.ndarray:
    """int64 [responses]: lognormal lengths, cut at `limit` as a run cuts them."""
    drawn = np.exp(generator.normal(np.log(median), sigma, responses))
    return np.clip(drawn, 1, limit).astype(np.int64)


def simulate(steps: np.ndarray, takes: list[Take], slots: int) -> Outcome:
    """Generate groups of `steps` decoding steps each on as many engines as there are `takes`."""
    engines = len(takes)
    ends = decode([supply(steps, take, slots) for take in takes], slots, step=lambda running: 1.0)
    makespan = max(ends)
    return Outcome(
        makespan, 1 - sum(ends) / (engines * makespan), 1 - float(steps.sum()) / (engines * slots * makespan)
    )


def supply(steps: np.ndarray, take: Take, slots: int) -> Supply:
    """An engine's groups: those that it has taken from the queue in advance, refilled whenever it asks."""
    waiting: deque[int] = deque()

    def following(running: int) -> float | None:
        while taken := take(running + len(waiting), slots):
            waiting.extend(taken)
        return float(steps[waiting.popleft()]) if waiting else None

    return following


def queue_takes(groups: int, engines: int) -> list[Take]:
    """The shared queue as every engine sees it."""
    counters: dict[str, int] = {}

    def add(name: str, amount: int) -> int:
        counters[name] = counters.get(name, 0) + amount
        return counters[name]

    return [PromptQueue(range(groups), engines, add).take for _ in range(engines)]


def static_takes(groups: int, engines: int) -> list[Take]:
    """The same number of groups for each engine, assigned in advance."""
    return [PromptQueue(range(engine, groups, engines)).take for engine in range(engines)]


def efficiency(responses: np.ndarray, per_update: int, prompt: int, dp: int, budget: int) -> np.ndarray:
    """float64 [updates]: share of packed tokens that are not padding, update by update."""
    updates = responses.reshape(-1, per_update)
    return np.array([plan((update + prompt).tolist(), dp, budget).efficiency for update in updates])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=256, help="updates of the stage")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of an update")
    parser.add_argument("--responses", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--limit", type=int, default=8192, help="longest response in tokens")
    parser.add_argument("--median", type=float, default=700.0)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lengths' logarithm: 1 is a heavy tail")
    parser.add_argument("--slots", type=int, default=32, help="groups that an engine decodes together")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = np.random.default_rng(options.seed)
    groups = options.updates * options.prompts
    # Responses to one prompt resemble each other: half of the spread is the prompt's own.
    own = lengths(groups, options.limit, options.median, options.sigma / 2**0.5, generator)
    drawn = [lengths(options.responses, options.limit, median, options.sigma / 2**0.5, generator) for median in own]
    responses = np.stack(drawn)
    steps = responses.max(1)
    flat = responses.flatten()
    print(f"{groups} groups of {options.responses}; response length in tokens: median {np.median(flat):.0f}, mean")
    cut = (flat == options.limit).mean()
    print(f"{flat.mean():.0f}, 99th percentile {np.quantile(flat, 0.99):.0f}, cut at {options.limit}: {cut:.1%}\n")
    print("| engines | idle, queue | idle, static split | stage takes, static / queue | empty slots, queue | static |")
    print("| --- | --- | --- | --- | --- | --- |")
    for engines in (2, 8, 32, 64):
        queue = simulate(steps, queue_takes(groups, engines), options.slots)
        static = simulate(steps, static_takes(groups, engines), options.slots)
        print(
            f"| {engines} | {queue.idle:.1%} | {static.idle:.1%} | {static.makespan / queue.makespan:.3f} | "
            f"{queue.empty:.1%} | {static.empty:.1%} |"
        )
    print("\n| data parallel ranks | useful tokens, mean | worst update |\n| --- | --- | --- |")
    per_update = options.prompts * options.responses
    for dp in (1, 2, 4, 8, 16):
        found = efficiency(flat, per_update, 100, dp, options.micro_batch_tokens)
        print(f"| {dp} | {found.mean():.2%} | {found.min():.2%} |")


if __name__ == "__main__":
    main()
