"""Peak memory and time of the stage store for growing stages of synthetic responses.

    python run_scripts/bench/store.py [--responses 1000 10000 100000] [--tokens 200] [--characters 4] [--routes 0]
                                      [--directory DIR]

Each size runs in its own process: it appends groups out of order, seals the stage and reads every update back. Memory
is the process's peak resident set after each of the three, minus that before the first append. The texts are cut out of
this project's pages; ids and log-probabilities are random, so they compress worse than a model's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet  # part of the baseline

from mugrpo_megatron.samples import HeldRoutes, Sample
from mugrpo_megatron.stages.store import StageStore

GROUP, PROMPTS_PER_UPDATE = 8, 32
PAGES = "".join(page.read_text(encoding="utf-8") for page in sorted(Path("docs").glob("*.md")))
WINDOW = 256
"""Groups finish up to about this many places out of order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument(
        "--tokens", type=int, default=200, help="mean response length; lengths are uniform up to twice it"
    )
    parser.add_argument(
        "--characters", type=int, default=4, help="of text for each token; 0 leaves out text, gold, reason and row"
    )
    parser.add_argument("--routes", type=int, default=0, help="layers of 8 chosen experts, a byte each, of every token")
    parser.add_argument("--directory", type=Path, help="where the stage is written; the temporary folder by default")
    options = parser.parse_args()
    print("responses  updates   append MiB / s    seal MiB / s    read MiB / ms an update    file MiB")
    for responses in options.responses:
        process = multiprocessing.get_context("spawn").Process(
            target=measure,
            args=(responses, options.tokens, options.characters, options.routes, options.directory),
        )
        process.start()
        process.join()


def measure(responses: int, tokens: int, characters: int, layers: int, parent: Path | None) -> None:
    """Fill, seal and read one stage, and print a line."""
    updates = max(1, responses // (GROUP * PROMPTS_PER_UPDATE))
    order = list(range(updates * PROMPTS_PER_UPDATE))
    shuffle = random.Random(0)
    order.sort(key=lambda index: index + shuffle.random() * WINDOW)
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        directory = Path(folder) / "stage"
        before = _peak_mib()
        marks = [time.perf_counter()]
        peaks = []
        store = StageStore(directory)
        for index in order:
            group = told(synthetic_group(index, tokens, generator), characters, index)
            store.append(routed(group, layers, generator) if layers else group)
        store.flush()
        marks.append(time.perf_counter())
        peaks.append(_peak_mib() - before)
        store.seal(updates, PROMPTS_PER_UPDATE)
        marks.append(time.perf_counter())
        peaks.append(_peak_mib() - before)
        reader = StageStore(directory)
        for update in range(updates):
            reader.read_update(update)
        marks.append(time.perf_counter())
        peaks.append(_peak_mib() - before)
        size = sum(path.stat().st_size for path in directory.iterdir()) / 2**20
    append, seal, read = (end - start for start, end in pairwise(marks))
    print(
        f"{updates * PROMPTS_PER_UPDATE * GROUP:9d}  {updates:7d}  {peaks[0]:10.0f} / {append:5.1f} "
        f"{peaks[1]:9.0f} / {seal:5.1f}  {peaks[2]:12.0f} / {1e3 * read / updates:5.1f}  {size:16.1f}"
    )


def routed(group: list[Sample], layers: int, generator: np.random.Generator) -> list[Sample]:
    """The group with random routes of that many layers."""
    shapes = [(layers, sample.tokens - 1, 8) for sample in group]
    held = [HeldRoutes(generator.integers(0, 128, shape, dtype=np.uint8)) for shape in shapes]
    return [replace(sample, routes=routes) for sample, routes in zip(group, held, strict=True)]


def told(group: list[Sample], characters: int, index: int) -> list[Sample]:
    """The group with texts of `characters` a token, a reason, an answer and a source row of 300 characters."""
    if not characters:
        return group
    found = []
    for place, sample in enumerate(group):
        start = hash((index, place)) % len(PAGES)
        text = (PAGES[start:] + PAGES)[: characters * len(sample.response_ids)]
        row = json.dumps({"problem": PAGES[index : index + 280], "level": index % 5})
        known: dict[str, Any] = {
            "gold": "42",
            "extracted": str(index),
            "why": "differs",
            "components": {"math": 0.0},
            "advantage": 0.5,
        }
        found.append(replace(sample, text=text, row=row, **known))
    return found


def synthetic_group(index: int, tokens: int, generator: np.random.Generator, vocabulary: int = 32_000) -> list[Sample]:
    """A finished group of random tokens; lengths are uniform up to twice `tokens`."""
    prompt = generator.integers(0, vocabulary, 20, dtype=np.int32)
    return [
        Sample(
            group=index,
            problem=f"synthetic:{index}",
            prompt_ids=prompt,
            response_ids=generator.integers(0, vocabulary, length, dtype=np.int32),
            behaviour_logprobs=-generator.random(length, dtype=np.float32),
            reward=float(generator.integers(0, 2)),
            weight_version=0,
            finish_reason="stop",
        )
        for length in generator.integers(1, 2 * tokens, GROUP).tolist()
    ]


def _peak_mib() -> float:
    pa.default_memory_pool().release_unused()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
