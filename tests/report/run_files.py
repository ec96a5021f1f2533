"""A run directory's stages, probes and kept responses, synthetic, of any size."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from mugrpo_megatron.observe.examples import Example, write_examples
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.probe import ProbeRow, probe_ages, write_age, write_responses
from mugrpo_megatron.stages.store import StageStore


def write_stage(
    run_dir: Path, stage: int, updates: int = 2, text: str = "so it is 4", gold: str = "4", length: int = 12
) -> None:
    """Of each group of four the first response is right; lengths are 1 to `length` tokens."""
    draw = random.Random(stage)
    store = StageStore(run_dir / "stages" / f"{stage:05d}")
    for group in range(updates * 2):
        samples = []
        for place in range(4):
            ids = np.arange(draw.randint(1, length), dtype=np.int32)
            samples.append(
                Sample(
                    group,
                    f"set:{group}",
                    ids[:1],
                    ids,
                    np.zeros(len(ids), dtype=np.float32),
                    float(place == 0),
                    0,
                    "stop",
                    text=text,
                    gold=gold,
                    extracted=text[:9],
                    why="equal" if place == 0 else "differs from the gold answer",
                    components={"math": float(place == 0)},
                )
            )
        store.append(samples)
    store.seal(updates, 2)


def write_probe(
    run_dir: Path,
    stage: int,
    updates: int,
    count: int,
    tokens: int,
    token: str = "ab",
    mask: list[bool] | None = None,
) -> None:
    """Every fourth response is positive; the third token of each becomes e^-age times as likely as it was."""
    draw = np.random.default_rng(stage)
    directory = run_dir / "probe" / f"stage{stage:05d}"
    behaviour = [draw.normal(-1, 0.3, tokens).astype(np.float32) for _ in range(count)]
    responses = [
        ProbeRow(
            place % updates, place, f"set:{place}", 0.0, -1.0 if place % 4 else 1.0, [token] * tokens, logprobs, mask
        )
        for place, logprobs in enumerate(behaviour)
    ]
    write_responses(directory, responses)
    for age in probe_ages(updates):
        moved = [logprobs + draw.normal(0, 0.02 * age / updates, tokens).astype(np.float32) for logprobs in behaviour]
        for logprobs, now in zip(behaviour, moved, strict=True):
            now[2] = logprobs[2] - age
        write_age(directory, age, moved)


def write_evaluation(
    run_dir: Path, updates: int, text: str = "so it is 4", sets: int = 1, question: str = "2+2="
) -> None:
    kept = [
        Example(
            f"set{number}", f"set{number}:{place}", question, "4", text, "4", "equal", float(place % 2), 9, place == 0
        )
        for number in range(sets)
        for place in range(6)
    ]
    write_examples(run_dir / "evaluations" / f"update{updates:06d}.jsonl", kept)
