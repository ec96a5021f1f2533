"""A step of run_scripts/dev/bench/ten.py: the seconds of the same updates, in stages of 4 and of 16.

Learner and engine share the GPU and take turns as in `train.py`. The lengths of responses are drawn once from a
published distribution. The engine is asked for responses of exactly these lengths, so both schedules decode the same
number of tokens.

    python -m run_scripts.dev.bench.ten_clock     # what the lengths are, and the predicted seconds of generation
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from run_scripts.dev.bench.ten_engine import engine_of, prompt_ids
from run_scripts.dev.bench.ten_learner import RESPONSES, Row, bucket_sizes, seconds_of

PUBLISHED = {
    0.0: 71, 0.5: 565, 0.9: 1319, 0.95: 1974, 1 - 0.0462: 2048, 1 - 0.0231: 3072, 1 - 0.0125: 4096, 1.0: 4096,
}  # fmt: skip
"""Share of responses -> tokens that they have at most: 1,600 of Qwen3-1.7B-Base to 200 problems of Polaris.

github.com/alee51/CS224R_Final_Project, main/docs/probes/group_a_results.md at 1d589d50: median, 90th, 95th and 99th
percentile, and the shares of at least 2,048, 3,072 and 4,096 tokens, where they were cut. 4,198 tokens/s for 271 s make
a mean of 711. The shortest length is not there; with 71 the mean of the drawn lengths is 711 too.
"""
SCALE = 0.5
"""Of those lengths; whole ones do not fit into ten minutes."""
SLOTS = 256
"""Responses that the engine decodes together (`recipe_of`)."""
STEP_TIMES = ((2.6e-3, 8.0e-6), (3.5e-3, 4.5e-6))
"""Seconds of a decoding step, and of each response in it: two guesses, both with the 54,900 tokens/s of 256."""


@dataclass(frozen=True)
class Work:
    """The work that each schedule has to do."""

    updates: int
    prompts: int
    """Prompts of an update; each gets RESPONSES responses."""
    lengths: np.ndarray
    """int [updates, responses of an update]: tokens of each response."""
    longest: int
    """Tokens at which responses are cut."""

    @property
    def responses(self) -> int:
        """Responses of an update."""
        return self.prompts * RESPONSES


def draw_work(small: bool) -> Work:
    """Draw 16 updates of 128 responses; with `small`, 4 of 16 with lengths divided by 32.

    That is one GPU's share of 128 x 8 responses on a node of eight.
    """
    updates, prompts, scale = (4, 2, SCALE / 32) if small else (16, 16, SCALE)
    shares = np.random.default_rng(0).random((updates, prompts * RESPONSES))
    tokens = np.exp(np.interp(shares, list(PUBLISHED), np.log(list(PUBLISHED.values()))))
    return Work(updates, prompts, np.ceil(scale * tokens).astype(int), int(scale * PUBLISHED[1.0]))


def predicted(work: Work, mu: int) -> list[float]:
    """Seconds of generation with each of STEP_TIMES, simulated request by request."""
    from mugrpo_megatron.extras.plan.lengths import decode

    def seconds(stage: np.ndarray, floor: float, each: float) -> float:
        waiting = iter(stage.ravel().tolist())
        [ended] = decode([lambda running: next(waiting, None)], SLOTS, lambda running: floor + each * running)
        return ended

    stages = [work.lengths[first : first + mu] for first in range(0, work.updates, mu)]
    return [sum(seconds(stage, *times) for stage in stages) for times in STEP_TIMES]


def clock(small: bool) -> Iterator[Row]:
    """Yield the planner's estimates, then the seconds of each schedule by phase."""
    from mugrpo_megatron.learner.learner import build_learner
    from mugrpo_megatron.weights.sync import build_weight_sync

    work, ways = draw_work(small), (2, 4) if small else (4, 16)
    tokens = int(work.lengths.sum())
    percentiles = np.percentile(work.lengths, (50, 90, 99)).tolist()
    yield {"tokens": tokens, "mean": tokens / work.lengths.size, "p50, p90, p99": percentiles}
    for mu in ways:
        yield {"predicted_for_mu": mu, "generate_s": predicted(work, mu)}
    with tempfile.TemporaryDirectory() as folder, engine_of(Path(folder), small, length_of(work)) as (recipe, engine):
        for mu in ways:
            yield {"planned_for_mu": mu, **planned(recipe, work, mu)}
        yield {"start_s": seconds_of(engine.wait_ready)}
        engine.sleep()
        mine = build_learner(recipe)
        weight_sync = build_weight_sync(mine.models, mine.architecture, bucket_sizes(small)[1], 1)
        turns = Turns(mine, engine, weight_sync, work.longest)
        # Two short updates: the first ones pin host memory and compile, which would count against the first way.
        yield {"warm_up": run_way(turns, replace(work, updates=2, lengths=np.minimum(work.lengths[:2], 64)), 2)}
        taken = {}
        for mu in ways:
            row = run_way(turns, work, mu)
            taken[mu] = row["total_s"]
            yield {"mu": mu, **row, "tokens_per_s": tokens / row["generate_s"]}
    few, many = ways
    stages_saved = work.updates // few - work.updates // many
    yield {"stage_costs_s": (taken[few] - taken[many]) / stages_saved, "ratio": taken[few] / taken[many]}


def length_of(work: Work) -> int:
    """Tokens of a prompt and a response together, of which `recipe_of` gives seven eighths to the response."""
    return -(-8 * work.longest // 7)


def planned(recipe: Any, work: Work, mu: int) -> Row:
    """The seconds that `mugrpo plan` estimates for the same work on one H200, with the mean and the spread of these
    lengths.

    The plan's lengths are log-normal; the spread is the standard deviation of the logarithm of these.
    """
    import json

    from mugrpo_megatron.extras.plan.case import make_case
    from mugrpo_megatron.extras.plan.decoding import decoding_seconds
    from mugrpo_megatron.extras.plan.hardware import Assumptions, make_cluster
    from mugrpo_megatron.extras.plan.memory import engine_memory
    from mugrpo_megatron.extras.plan.time import update_seconds
    from mugrpo_megatron.weights.families import read_architecture

    mean = float(work.lengths.mean()) / recipe.rollout.max_response_tokens
    prompt = len(prompt_ids(1)[0]) / recipe.data.max_prompt_tokens
    spread = float(np.log(work.lengths).std())
    assumptions = replace(Assumptions(), mean_response=mean, mean_prompt=prompt, spread=spread)
    sizes = {"prompts_per_update": work.prompts, "responses_per_prompt": RESPONSES}
    changed = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=sizes)})
    config = json.loads((recipe.model.directory / "config.json").read_text(encoding="utf-8"))
    architecture = read_architecture(recipe.model.directory)
    case = make_case(changed, architecture, config, make_cluster(1, 1, "h200"), assumptions)
    stage = decoding_seconds(mu * work.responses, case, engine_memory(case))
    return {
        "generate_s": work.updates // mu * stage,
        "optimize_s": work.updates * update_seconds(case),
    }


@dataclass
class Turns:
    """Learner and engine on one device, in the order of `train.hand_over`."""

    learner: Any
    engine: Any
    weight_sync: Any
    longest: int
    """Tokens at which responses are cut."""

    def to_engine(self) -> Row:
        """Seconds of each step until the engine can sample with the learner's weights."""
        from mugrpo_megatron.weights.sync import sync

        return timed(
            optimizer_sleeps=lambda: self.learner.offload("optimizer"),
            weights_wake=lambda: self.engine.wake("weights"),
            sync=lambda: sync(self.weight_sync, self.engine, version=1),
            weights_sleep=lambda: self.learner.offload("weights"),
            cache_wakes=lambda: self.engine.wake("kv_cache"),
        )

    def to_learner(self) -> Row:
        """Seconds of each step until the learner can take an update."""
        return timed(engine_sleeps=self.engine.sleep, learner_wakes=self.learner.reload)

    def generate(self, lengths: np.ndarray) -> tuple[list[list[Any]], Row]:
        """Sample one response of each length; returns the samples by update, and seconds.

        `tail_s` is the time in which no prompt was waiting any more.
        """
        from mugrpo_megatron.engine.wire import Request, Sampling
        from mugrpo_megatron.samples import Sample

        updates, of_update = lengths.shape
        ids = prompt_ids(-(-lengths.size // RESPONSES))
        requests = [
            Request(key, ids[key // RESPONSES], 1, key, max_tokens=int(length))
            for key, length in enumerate(lengths.flat)
        ]
        slots, waiting = self.engine.slots(1), iter(requests)
        samples: list[Any] = [None] * len(requests)
        sent = done = 0
        started = last_start = time.perf_counter()
        with self.engine.generation(Sampling(1.0, 1.0, self.longest, ())):
            while done < len(requests):
                if batch := [request for _, request in zip(range(2 * slots - sent + done), waiting, strict=False)]:
                    self.engine.submit(batch)
                    sent += len(batch)
                for key, (got,) in self.engine.receive_groups():
                    if sent == len(requests) and sent - done > slots:
                        last_start = time.perf_counter()
                    done += 1
                    prompt = np.array(requests[key].ids, np.int32)
                    group, reward = key // RESPONSES, float(key % 2)
                    sample = Sample(group, str(group), prompt, got.ids, got.logprobs, reward, 1, got.finish_reason)
                    samples[key] = replace(sample, behaviour_logprobs=got.logprobs)
        ended = time.perf_counter()
        assert [len(sample.response_ids) for sample in samples] == lengths.ravel().tolist(), (
            "every response has its length"
        )
        groups = [samples[number * of_update : (number + 1) * of_update] for number in range(updates)]
        return groups, {"generate_s": ended - started, "tail_s": ended - last_start}


def run_way(turns: Turns, work: Work, mu: int) -> Row:
    """Take all updates in stages of `mu`; returns seconds by phase. Learner and engine end in the state in which they
    began."""
    from mugrpo_megatron.learner.update import update

    sums: dict[str, float] = {}

    def add(row: Row) -> None:
        for name, value in row.items():
            sums[name] = sums.get(name, 0.0) + value

    started = time.perf_counter()
    for first in range(0, work.updates, mu):
        add(turns.to_engine())
        stage, row = turns.generate(work.lengths[first : first + mu])
        add(row | turns.to_learner())
        for samples in stage:
            advantages = np.random.default_rng(first).normal(size=len(samples)).astype(np.float32)
            add(timed(optimize=lambda s=samples, a=advantages: update(turns.learner, s, a)))  # type: ignore[misc]
    sums["total_s"] = time.perf_counter() - started
    others = ("sync_s", "generate_s", "tail_s", "optimize_s", "total_s")
    switch = sum(value for name, value in sums.items() if name not in others)
    return {"stages": work.updates // mu, **sums, "switch_s": switch}


def timed(**steps: Callable[[], object]) -> Row:
    """Seconds of each step, one after the other."""
    return {f"{name}_s": seconds_of(step) for name, step in steps.items()}


if __name__ == "__main__":
    drawn = draw_work(small=False)
    print({"tokens": int(drawn.lengths.sum()), "mean": drawn.lengths.mean(), "longest": drawn.longest})
    print({mu: predicted(drawn, mu) for mu in (4, 16)})
