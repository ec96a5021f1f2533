"""What a small stage's longest response costs: the same responses, generated in stages of µ updates, timed.

    python -m run_scripts.study.stragglers --model runs/study/warm-start/hf --out docs/study/stragglers.json

The lengths are those of the right answers to the bundled task with a heavy tail (`arithmetic_long`); every response is
made exactly as long as its own, end-of-sequence or not, so all rows of the table decode the same tokens with the same
engine and differ in when the next responses may start. Rounds take turns, so that other work on the machine hits all.
Then the largest stage again with fewer places in the engine: what a learner that stays in memory would leave it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mugrpo_megatron.engine.host import load_engine
from mugrpo_megatron.engine.launch import engine_arguments, engine_environment, runs_on_cuda
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.recipe import Recipe
from run_scripts.study.collect import DOCS
from run_scripts.study.heavy_tail import PROMPTS, long_lengths, places_table, straggler_table

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
"""Eight tokens, never shared through a prefix cache, which the engine runs without."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    lengths = long_lengths(options.updates * PROMPTS)
    largest = max(options.mu)
    with _engine(options.model, options.running[0]) as engine:
        seconds = _measure(engine, lengths, options.mu, options)
    places = {options.running[0]: seconds[largest]}
    for running in options.running[1:]:
        with _engine(options.model, running) as engine:
            places[running] = _measure(engine, lengths, [largest], options)[largest]
    found = {
        "updates": options.updates,
        "responses": len(lengths),
        "tokens": sum(lengths),
        "running": options.running[0],
        "rounds": options.rounds,
        "seconds": seconds,
        "places": places,
    }
    write_text(options.out, json.dumps(found) + "\n")
    print(straggler_table(found), places_table(found), sep="\n\n")
    return 0


@contextmanager
def _engine(model: Path, running: int) -> Iterator[Any]:
    """A bare engine with the arguments that a run gives it, on this machine's device."""
    recipe = Recipe.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "data": {"max_prompt_tokens": len(PROMPT)},
            "rollout": {"max_response_tokens": 256},
            "engine": {"max_running_requests": running},
        }
    )
    cuda = runs_on_cuda(recipe)
    os.environ.update(engine_environment(recipe, model, cuda))
    engine = load_engine(engine_arguments(recipe, model, cuda))  # imports SGLang, which reads the environment then
    engine.freeze_gc()
    try:
        yield engine
    finally:
        engine.shutdown()


def _measure(
    engine: Any, lengths: Sequence[int], sizes: Sequence[int], options: argparse.Namespace
) -> dict[int, list[float]]:
    """Seconds of generating all `lengths` in stages of µ updates, for each µ of `sizes` and each round."""
    per_update = len(lengths) // options.updates
    _generate(engine, lengths[:per_update])  # warms up
    seconds: dict[int, list[float]] = {mu: [] for mu in sizes}
    for _ in range(options.rounds):
        for mu, times in seconds.items():
            stages = [lengths[i : i + mu * per_update] for i in range(0, len(lengths), mu * per_update)]
            start = time.perf_counter()
            for stage in stages:
                _generate(engine, stage)
            times.append(round(time.perf_counter() - start, 2))
            print(f"µ={mu}: {len(stages)} stages in {times[-1]:.1f} s", flush=True)
    return seconds


def _generate(engine: Any, lengths: Sequence[int]) -> None:
    asked = [{"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    outputs = engine.generate(input_ids=[PROMPT] * len(lengths), sampling_params=asked)
    made = [output["meta_info"]["completion_tokens"] for output in outputs]
    if made != list(lengths):
        raise RuntimeError("the engine did not make the lengths that were asked for")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/study/warm-start/hf"), help="checkpoint directory")
    parser.add_argument("--mu", type=int, nargs="+", default=[1, 4, 16, 32], help="updates per stage")
    parser.add_argument("--updates", type=int, default=32)
    parser.add_argument(
        "--running",
        type=int,
        nargs="+",
        default=[1024, 512, 256, 128],
        help="engine.max_running_requests: the first for every µ, the others for the largest alone",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=DOCS / "stragglers.json")
    options = parser.parse_args(arguments)
    if wrong := [mu for mu in options.mu if mu < 1 or options.updates % mu]:
        parser.error(f"--mu {wrong[0]} does not divide --updates {options.updates}")
    return options


if __name__ == "__main__":
    sys.exit(main())
