"""Whether slow tools idle the engine: the same episodes with a tool that sleeps, and with one that does not.

    python -m run_scripts.bench.slow_tools MODEL [--episodes 800] [--at-once 200] [--seconds 5]

Every episode is two turns of up to 64 tokens with a call between them. The engine's share of time with a request in it,
and its tokens per second, are those of the whole run, beginning and end included.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mugrpo_megatron.data.arithmetic import problems
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.launch import sampling
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Prompt

GROUP = 4


async def episode(problem: Any, model: Any) -> float:
    """Two turns, and a tool that sleeps as long as the problem's row says."""
    await model.generate(model.prompt_ids, max_tokens=64)
    await model.call(_sleep, seconds=problem.row["seconds"])
    turn = await model.generate([*model.ids, *await model.encode(" 7 ")], max_tokens=64)
    return float(len(turn.ids))


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def measured(model: Path, episodes: int, at_once: int, seconds: float) -> dict[str, float]:
    """Seconds, tokens and shares of one run."""
    recipe = Recipe.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "data": {"max_prompt_tokens": 32},
            "rollout": {"function": "run_scripts.bench.slow_tools:episode", "max_response_tokens": 160},
            "episodes": {"at_once": at_once, "seconds": 600.0},
            "engine": {"max_running_requests": 64},
        }
    )
    tokenizer = load_tokenizer(model)
    row = {"seconds": seconds}
    drawn = problems(0, "train", episodes // GROUP, "chain")
    source = iter(
        Prompt(place, type(one)(one.id, one.question, one.answer, row=row), tokenizer.encode(one.question))
        for place, one in enumerate(drawn)
    )

    def take(held: int, slots: int) -> list[Prompt]:
        return list(islice(source, max(0, 2 * slots - held)))

    with TemporaryDirectory() as folder:
        engine = Engine.start(recipe, model, Path(folder) / "engine.log")
        try:
            engine.wait_ready()
            start = time.perf_counter()
            groups = [group for _, group in engine.generate_from(take, GROUP, sampling(recipe, tokenizer))]
            wall = time.perf_counter() - start
            tokens = sum(int(one.episode.mask.sum()) for group in groups for one in group if one.episode)
            done = sum(not one.episode.failed for group in groups for one in group if one.episode)
            busy = engine._episodes.busy_s / engine._episodes.total_s
        finally:
            engine.stop()
    return {"episodes": done, "seconds": wall, "tokens/s": tokens / wall, "busy": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--episodes", type=int, default=800)
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    for seconds in (0.0, given.seconds):
        figures = measured(given.model, given.episodes, given.at_once, seconds)
        print(f"tool of {seconds:g} s:", ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
