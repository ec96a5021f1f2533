"""Run directories with synthetic rows, stages, probes and evaluations, for any number of stages and updates."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mugrpo_megatron.evaluation.estimators import Interval, SetFigures, figures_of
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.observe.examples import Example, write_examples
from mugrpo_megatron.observe.rundata import RunData
from mugrpo_megatron.recipe import Recipe, dump_recipe
from mugrpo_megatron.recipe.load import validate
from mugrpo_megatron.report.curves import Chart
from mugrpo_megatron.report.details import read_details
from mugrpo_megatron.report.drawing import draw
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.probe import ProbeRow, probe_ages, write_age, write_responses
from mugrpo_megatron.stages.store import StageStore

Row = dict[str, Any]

THRESHOLDS = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6")


def rows_of(
    stages: int,
    updates: int,
    *,
    seed: int = 0,
    begin: float = 1.7e9,
    sets: Sequence[str] = ("arithmetic",),
    eval_every: int | None = None,
) -> list[Row]:
    """What a run of `stages` x `updates` would log, an evaluation before every stage and one after the last.

    With `eval_every`, also after every so many updates inside a stage.
    """
    draw = random.Random(seed)
    now = begin
    total = stages * updates
    environment = {"mugrpo-megatron": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.9", "devices": "none (CPU)"}
    rows: list[Row] = [{"kind": "process", "time": now, "environment": environment}]

    def phase(name: str, stage: int, seconds: float, **metrics: float) -> None:
        nonlocal now
        rows.append({"kind": "phase", "phase": name, "stage": stage, "start": now, "end": now + seconds, **metrics})
        now += seconds + 0.01

    def skill(update: int) -> float:
        return 0.47 + 0.38 * (1 - math.exp(-3.0 * update / total))

    def evaluation(stage: int, update: int, age: int = 0) -> None:
        figures = {}
        for name in sets:
            noise = draw.gauss(0, 0.008)
            accuracy = skill(update) + (noise if update else 0.0)  # before the first update all seeds are one model
            figures[name] = SetFigures(Interval(accuracy, accuracy - 0.04, accuracy + 0.035), 500, 1)
        place = {"kind": "eval", "time": now, "stage": stage, "update": update, "age": age}
        rows.append({**place, **(figures_of("accuracy", figures) if figures else {}), "tokens": 4000})

    phase("start", 0, 14.0)
    for stage in range(stages):
        phase("sync", stage, 0.05, bytes=1.6e6)
        evaluation(stage, stage * updates)
        phase("eval", stage, 0.6)
        tokens = updates * 256 * 8.0
        phase("generate", stage, updates * 0.16 + 0.2, tokens=tokens)
        phase("score", stage, 0.1)
        rows.append(
            {
                "kind": "stage",
                "time": now,
                "stage": stage,
                "reward_mean": skill(stage * updates),
                "generated_tokens": tokens,
            }
            | {"response_length_mean": 7.5 + draw.random(), "response_length_max": 24, "responses": updates * 256}
            | {"truncated_fraction": 0.02 * draw.random(), "zero_variance_fraction": 0.1 + 0.4 * stage / stages}
            | {"mismatch_mean": 1e-6, "mismatch_p99": 6e-6, "mismatch_max": 3e-5}
        )
        start = now
        for age in range(updates):
            if eval_every and age and age % eval_every == 0:
                evaluation(stage, stage * updates + age, age)
                phase("eval", stage, 0.6)
            now += 0.2
            rows.append(_update(draw, stage, stage * updates + age, age, now, skill(stage * updates), total))
        end, now = now, start
        phase("optimize", stage, end - start, tokens=tokens)
        phase("save", stage, 0.15)
    evaluation(stages - 1, total, updates)
    phase("eval", stages - 1, 0.6)
    return rows


def _triggers(draw: random.Random, stale: float) -> Row:
    """Shares that grow with age and fall with the threshold, counted on 1024 negative tokens of 128 responses."""
    row: Row = {"ratio_neg_min": math.exp(-min(20.0, 9.0 * stale * abs(draw.gauss(1, 0.3))))}
    for name in THRESHOLDS:
        share = min(0.2, 0.02 * stale * float(name) ** 0.35 * abs(draw.gauss(1, 0.3)))
        tokens = round(1024 * share) / 1024
        responses = round(128 * (1 - (1 - tokens) ** 8)) / 128
        after = 0.5 * responses * abs(draw.gauss(1, 0.1))
        row |= {f"trigger_tokens_{name}": tokens, f"trigger_responses_{name}": responses}
        dropped = {"trigger": tokens / 2, "suffix": after, "suffix_non_trigger": 0.9 * after, "response": 1.7 * after}
        row |= {f"dropped_{scope}_{name}": share for scope, share in dropped.items()}
    return row


def _update(draw: random.Random, stage: int, update: int, age: int, now: float, reward: float, total: int) -> Row:
    stale = age / 64
    return _triggers(draw, stale) | {
        "kind": "update",
        "time": now,
        "stage": stage,
        "update": update,
        "age": age,
        "loss": draw.gauss(-0.002, 0.01),
        "reward_mean": reward + draw.gauss(0, 0.03),
        "ratio_neg_mean": 1 - 0.12 * stale + draw.gauss(0, 0.003) * (age > 0),
        "ratio_neg_p99": 1 + 1.5 * stale * abs(draw.gauss(1, 0.1)),
        "ratio_neg_max": 1 + 40 * stale * abs(draw.gauss(1, 0.5)),
        "clipped_fraction": 0.004 * stale * abs(draw.gauss(1, 0.3)),
        "vetoed_fraction": 0.11 * (1 - math.exp(-2 * stale)) * abs(draw.gauss(1, 0.05)),
        "ess": 1 / (1 + 0.35 * stale**1.3) - 0.01 * draw.random() * (age > 0),
        "kl_k1": 0.05 * stale + draw.gauss(0, 0.002) * (age > 0),
        "kl_k3": 0.06 * stale * abs(draw.gauss(1, 0.05)),
        "second_moment": 0.12 * stale,
        "entropy": 0.9 * math.exp(-1.2 * update / total) + draw.gauss(0, 0.01),
        "grad_norm": abs(draw.gauss(0.45, 0.12)),
        "lr": 1e-4 * min(1, (update + 1) / 10),
        "skipped": 0.0,
        "tokens": 2048.0,
        "packed_efficiency": 0.97,
        "seconds": 0.19,
    }


def charts_of(run: RunData) -> dict[str, Chart]:
    """The charts of a run's page, by id."""
    return {chart.id: chart for chart in draw(run, read_details(run.path, run.recipe)).charts}


def drawing_in(html: str) -> Any:
    """The data inside a page, as its script reads them."""
    return json.loads(html.partition('id="drawing">')[2].partition("</script>")[0])


def recipe_of(stages: int, updates: int) -> Recipe:
    schedule = {"stages": stages, "updates_per_stage": updates}
    return validate({"schedule": schedule, "optimizer": {"lr": 1e-4}, "run": {"seed": 3}}, source="synthetic")


def write_run(directory: Path, rows: list[Row], recipe: Recipe, summary: Row | None = None) -> Path:
    """A run directory with these rows; `summary` None leaves the run unfinished."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "recipe.toml").write_text(dump_recipe(recipe))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        write_json(directory / "summary.json", summary)
    return directory


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
