"""Whether slow tools idle the engine: the same episodes with a tool that sleeps, and with one that does not.

    python -m run_scripts.bench.slow_tools MODEL [--episodes 4800] [--seconds 5]

Every episode is two turns of up to 64 tokens with a call between them. By Little's law the engine lacks no work once
as many episodes are in flight as it runs at a time, and those that it would end while a tool sleeps; that floor is
printed after the run without sleep. Figures are of the whole run, first and last sleep included; `steady` is the busy
share from the first finished group to the last prompt that begins.
"""

from __future__ import annotations

import argparse
import os
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
REQUESTS = 64
"""That the engine runs at a time."""


async def episode(problem: Any, model: Any) -> float:
    """Two turns, and a tool that sleeps as long as the problem's row says."""
    await model.generate(model.prompt_ids, max_tokens=64)
    await model.call(_sleep, seconds=problem.row["seconds"], log=problem.row["log"])
    turn = await model.generate([*model.ids, *await model.encode(" 7 ")], max_tokens=64)
    return float(len(turn.ids))


def _sleep(seconds: float, log: str) -> None:
    """Sleep, and append when: tools of several processes write to one file, a line at a time."""
    begin = time.monotonic()
    time.sleep(seconds)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{begin} {time.monotonic()}\n".encode())
    os.close(file)


def tools_at_once(log: Path) -> tuple[int, float]:
    """The most tools that ran at once, and their mean from the first one's begin to the last one's end."""
    spans = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    running = most = 0
    for _, change in sorted([*((begin, 1) for begin, _ in spans), *((end, -1) for _, end in spans)]):
        running += change
        most = max(most, running)
    wall = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return most, sum(end - begin for begin, end in spans) / wall


def measured(model: Path, episodes: int, seconds: float) -> dict[str, float]:
    """Seconds, tokens and shares of one run."""
    recipe = Recipe.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "data": {"max_prompt_tokens": 32},
            "rollout": {"function": "run_scripts.bench.slow_tools:episode", "max_response_tokens": 160},
            "episodes": {"seconds": 600.0},
            "engine": {"max_running_requests": REQUESTS},
        }
    )
    tokenizer = load_tokenizer(model)
    marks: list[tuple[float, float]] = []
    """(busy, total) seconds at the first finished group, and when no prompt is left."""

    with TemporaryDirectory() as folder:
        log = Path(folder) / "tools"
        row = {"seconds": seconds, "log": str(log)}
        drawn = problems(0, "train", episodes // GROUP, "chain")
        source = iter(
            Prompt(place, type(one)(one.id, one.question, one.answer, row=row), tokenizer.encode(one.question))
            for place, one in enumerate(drawn)
        )
        engine = Engine.start(recipe, model, Path(folder) / "engine.log")

        def mark() -> None:
            marks.append((engine._episodes.busy_s, engine._episodes.total_s))

        def take(held: int, slots: int) -> list[Prompt]:
            most = max(0, 2 * slots - held)
            prompts = list(islice(source, most))
            if len(prompts) < most and len(marks) == 1:
                mark()
            return prompts

        try:
            engine.wait_ready()
            start = time.perf_counter()
            groups = []
            for _, group in engine.generate_from(take, GROUP, sampling(recipe, tokenizer)):
                groups.append(group)
                if len(groups) == 1:
                    mark()
            wall = time.perf_counter() - start
            tokens = sum(int(one.episode.mask.sum()) for group in groups for one in group if one.episode)
            done = sum(not one.episode.failed for group in groups for one in group if one.episode)
            mark()
            most, mean = tools_at_once(log)
        finally:
            engine.stop()
    (early, begin), (late, end), (busy, total) = marks[0], marks[1], marks[-1]
    return {
        "episodes": done,
        "seconds": wall,
        "episodes/s": done / wall,
        "tokens/s": tokens / wall,
        "busy": busy / total,
        "steady": (late - early) / (end - begin) if end > begin else float("nan"),
        "tools at once, most": most,
        "mean": mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--episodes", type=int, default=4800)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    for seconds in (0.0, options.seconds):
        figures = measured(options.model, options.episodes, seconds)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"tool of {seconds:g} s: {shown}", flush=True)
        if not seconds:
            floor = REQUESTS + figures["episodes/s"] * options.seconds
            print(f"the engine lacks no work from {floor:.0f} in flight on", flush=True)


if __name__ == "__main__":
    main()
