"""Optimization: everything around the updates on a sealed stage that is shown and logged, and when it gives up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pyarrow.parquet as pq
import torch

from mugrpo_megatron.algorithm.advantages import informative
from mugrpo_megatron.errors import TrainingFailure
from mugrpo_megatron.files.durable import durable_file
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import token_logprobs
from mugrpo_megatron.observe.environment import learner_memory_peak, peak_flops, reset_peak_memory
from mugrpo_megatron.observe.metrics import MISMATCH_RESPONSES
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.probe import probe
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.schema import to_table
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.stages.summary import component_means
from mugrpo_megatron.weights.families import model_flops

WANDB_SAMPLES = 16
"""Responses of each stage in a table of Weights & Biases."""


def record_stage(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Log a new stage: its statistics, by how much engine and learner differ on the same weights, and samples of it.

    A stage that other weights have sampled (`schedule.prefetch`) has no such figure: the learner's are later ones.
    """
    if cursor.age > 0:
        return  # the weights have changed; it was done at the stage's start
    samples = stage.read_update(0)[:MISMATCH_RESPONSES]
    same = samples[0].weight_version == cursor.updates
    run.log.stage(cursor.stage, stage.statistics() | (_mismatch(run, learner, samples, cursor) if same else {}))
    if run.is_main and run.recipe.track.wandb_project:
        run.log.samples(cursor.stage, _shown(stage.read_update(0, whole=True)[:WANDB_SAMPLES]))
    probe(run, learner, cursor, age=0)


def _mismatch(run: Run, learner: Learner, samples: Sequence[Sample], cursor: Cursor) -> dict[str, float]:
    """By how much engine and learner differ; empty for responses that were imported without logprobs."""
    with run.log.phase("logprobs", cursor.stage):
        own = np.concatenate(token_logprobs(learner, samples))
    engines = np.concatenate([sample.behaviour_logprobs for sample in samples])
    if np.isnan(engines).any():
        return {}
    distance = np.abs(engines - own)
    return {
        "mismatch_mean": float(distance.mean()),
        "mismatch_p99": float(np.quantile(distance, 0.99)),
        "mismatch_max": float(distance.max()),
    }


def _shown(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What a table of responses says about each."""
    names = ("group", "problem", "text", "gold", "extracted", "why", "reward", "finish_reason")
    return [{name: getattr(sample, name) for name in names} for sample in samples]


@contextmanager
def optimizing(run: Run, cursor: Cursor) -> Iterator[Bar]:
    """The phase's wall-clock and a bar around the updates up to the stage's end or the next evaluation."""
    length = cursor.stage_length(run.recipe.schedule, run.stage_store(cursor).updates)
    every, updates = run.evaluates_every, length - cursor.age
    updates = min(updates, every - cursor.age % every) if every else updates
    reset_peak_memory()
    with (
        run.phase("optimize", cursor) as facts,
        run.display.bar(f"{run.title(cursor)}: optimize", updates, "updates") as bar,
    ):
        yield bar
        facts["tokens"] = float(bar.tokens)
        facts["learner_memory_peak"] = max(run.world.gather(learner_memory_peak()))


def record_update(
    run: Run, learner: Learner, cursor: Cursor, samples: Sequence[Sample], metrics: dict[str, float], bar: Bar
) -> None:
    """Log one update and advance the bar; TrainingFailure after `optimizer.max_skipped` skipped updates in a row."""
    reward = float(np.mean([sample.reward for sample in samples]))
    parts = component_means(sample.components for sample in samples)
    staleness = cursor.updates - samples[0].weight_version
    alike = ~informative(np.array([s.reward for s in samples]), np.array([s.group for s in samples]))
    shares = {"zero_variance_fraction": float(alike.mean())}  # of groups too: all have as many responses
    found = {"staleness": staleness, **metrics, "reward_mean": reward, **parts, **shares}
    found |= _utilization(learner, samples, metrics)
    run.log.update(cursor.stage, cursor.updates, cursor.age, found)
    bar.advance(tokens=int(metrics["tokens"]), reward=reward, loss=metrics["loss"])
    if learner.skipped_in_a_row >= run.recipe.optimizer.max_skipped:
        _give_up(run, learner, cursor, samples)
    probe(run, learner, cursor, age=cursor.age + 1)


def _utilization(learner: Learner, samples: Sequence[Sample], metrics: dict[str, float]) -> dict[str, float]:
    """The update's FLOP per second and device, and its share of the device's peak where that is known."""
    ranks = learner.ranks
    flops = model_flops(learner.architecture, [sample.tokens for sample in samples], int(metrics["tokens"]))
    reached = flops / metrics["seconds"] / ranks.world
    peak = peak_flops(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None
    return {"tflops": reached / 1e12} | ({"mfu": reached / peak} if peak else {})


def _give_up(run: Run, learner: Learner, cursor: Cursor, samples: Sequence[Sample]) -> NoReturn:
    run.saver.save(cursor.advanced(run.recipe.schedule, run.stage_store(cursor).updates))
    run.saver.wait()
    path = run.directory.poisoned(cursor.stage, cursor.age)
    if run.is_main:
        path.parent.mkdir(exist_ok=True)
        with durable_file(path) as file:
            pq.write_table(to_table(samples), file)
    raise TrainingFailure(
        f"{learner.skipped_in_a_row} updates in a row had a non-finite gradient and were skipped, the last one "
        f"update {cursor.age} of stage {cursor.stage} (both from 0). The learner is saved, the batch is in {path}. "
        "Look at grad_norm, ratio_pos_max and ratio_neg_max before it in the report; a lower optimizer.lr is the usual "
        "way out"
    )
