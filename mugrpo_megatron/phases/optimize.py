"""Optimization: everything around the updates on a sealed stage: logprobs, reading, logging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pyarrow.parquet as pq
import torch

from mugrpo_megatron.algorithm.advantages import informative, informative_updates
from mugrpo_megatron.data.order import update_at
from mugrpo_megatron.errors import TrainingFailure, UserError
from mugrpo_megatron.files.durable import durable_file, fsync
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import record_routes, token_logprobs
from mugrpo_megatron.observe.metrics import MISMATCH_RESPONSES
from mugrpo_megatron.observe.peaks import learner_memory_peak, peak_flops, reset_peak_memory
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.probe import probe
from mugrpo_megatron.phases.saves import stop_if_asked
from mugrpo_megatron.run.anchor import with_anchor
from mugrpo_megatron.run.checkpoints import complete
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.logprobs import has_logprobs, read_logprobs, sums, write_logprobs
from mugrpo_megatron.stages.routes import has_routes, index, of_stage, routes_path, write_routes
from mugrpo_megatron.stages.schema import to_table
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.stages.summary import component_means
from mugrpo_megatron.weights.flops import model_flops


def measure_mismatch(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Log a new stage's statistics, and by how much engine and learner differ on the same weights."""
    if cursor.age > 0:
        return  # the weights have changed; it was measured at the stage's start
    samples = stage.read_update(0)[:MISMATCH_RESPONSES]
    with run.log.phase("logprobs", cursor.stage):
        own = np.concatenate(token_logprobs(learner, samples))
    engines = np.concatenate([sample.behaviour_logprobs for sample in samples])
    distance = np.abs(engines - own)
    mismatch = {
        "mismatch_mean": float(distance.mean()),
        "mismatch_p99": float(np.quantile(distance, 0.99)),
        "mismatch_max": float(distance.max()),
    }
    known = not np.isnan(engines).any()  # unless the responses were imported without logprobs
    run.log.stage(cursor.stage, stage.statistics() | (mismatch if known else {}))
    if run.is_main and run.recipe.track.wandb_project:
        run.log.samples(cursor.stage, _shown(stage.read_update(0, whole=True)[: run.recipe.track.wandb_samples]))
    probe(run, learner, cursor, age=0)


def _shown(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What a table of responses says about each."""
    names = ("group", "problem", "text", "gold", "extracted", "why", "reward", "finish_reason")
    return [{name: getattr(sample, name) for name in names} for sample in samples]


def recompute_behaviour(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Compute what the recipe wants of the learner before the stage's first update, in one pass.

    These are the behaviour logprobs with `rollout.behaviour = "learner"`, and the experts that the routers choose with
    `learner.routing_replay = "learner"`; the logprobs are those of a pass that replays them, bit by bit.
    """
    path, routes = run.directory.behaviour(cursor.stage), routes_path(stage.directory, "learner")
    scores = run.recipe.rollout.behaviour == "learner" and not has_logprobs(path)
    records = stage.replay == "learner" and not has_routes(routes)
    if cursor.age > 0:  # the weights that they are of have changed
        for missing in [path, sums(path)] * scores + [routes, index(routes)] * records:
            if not missing.exists():
                raise UserError(f"{missing} is missing; {_behaviour_remedy(run, cursor.stage)}")
    if not scores and not records:
        return
    with (
        run.log.phase("logprobs", cursor.stage),
        run.display.bar(f"{run.title(cursor)}: learner logprobs", stage.updates, "updates") as bar,
        write_logprobs(path, _of_behaviour(stage), write=run.is_main and scores) as append,
        write_routes(routes, of_stage(stage.content), write=run.is_main and records) as append_routes,
    ):
        for age in range(stage.updates):
            stop_if_asked(run, cursor)
            samples = stage.read_update(age)
            if records:
                logprobs, layers = record_routes(learner, samples)
                append_routes([sample.tokens - 1 for sample in samples], layers)
            else:
                logprobs = token_logprobs(learner, samples)
            append(logprobs)
            bar.advance()
    run.world.barrier()


def refresh_reference(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Every `objective.reference_every` updates the clip's reference policy becomes the current one.

    That policy is kept as its logprobs of all samples until the next refresh, on disk before the first of these updates
    is taken. They are recomputed when a run resumes at this cursor.
    """
    every = run.recipe.objective.reference_every
    if every == 1 or cursor.age % every:
        return
    path = run.directory.reference(cursor.stage, cursor.age)
    ages = range(cursor.stage_length(run.recipe.schedule, stage.updates))[cursor.age : cursor.age + every]
    if run.is_main:
        path.parent.mkdir(exist_ok=True)
        fsync(run.directory.path)
    with (
        run.log.phase("logprobs", cursor.stage),
        run.display.bar(f"{run.title(cursor)}: reference logprobs", len(ages), "updates") as bar,
        write_logprobs(path, _of_reference(run, stage, cursor.age), write=run.is_main) as append,
    ):
        for age in ages:
            stop_if_asked(run, cursor)
            append(token_logprobs(learner, _formed_update(run, stage, cursor.stage, age)))
            bar.advance()
    if run.is_main:
        _remove_passed_references(run)
    run.world.barrier()


def _remove_passed_references(run: Run) -> None:
    """Remove the reference files that no checkpoint can need: all before the one that the oldest checkpoint needs.

    The run resumes from one of its complete checkpoints, or from a later one that is still being written.
    """
    for checkpoint in complete(run.directory.checkpoints)[:1]:
        begun = [path for path in sorted(run.directory.references.glob("*.parquet")) if path.stem <= checkpoint.name]
        for path in begun[:-1]:
            sums(path).unlink(missing_ok=True)
            path.unlink()


def read_update(run: Run, stage: StageStore, cursor: Cursor) -> list[Sample]:
    """The samples of one update, with the behaviour and reference logprobs that the recipe asks for.

    Passes over the stage after the first take its updates in an order that the run's seed shuffles. With
    `objective.zero_variance = "leave_out"` updates consist of informative groups only. Raises UserError when the
    reference of a resumed run's update is missing.
    """
    samples = _formed_update(run, stage, cursor.stage, cursor.age)
    every = run.recipe.objective.reference_every
    if every == 1:
        return samples
    place = cursor.age % every
    begun = Cursor(cursor.stage, cursor.age - place)
    path = run.directory.reference(begun.stage, begun.age)
    remedy = (
        f"update {cursor.age} of stage {cursor.stage} (both from 0) clips around what it held; restore it from a copy, "
        f"or remove the checkpoints after {checkpoint_name(begun)} from {run.directory.checkpoints}, so that the run "
        "resumes from an earlier one"
    )
    if not has_logprobs(path):
        raise UserError(f"{path} is gone, and {remedy}")
    reference = read_logprobs(path, _of_reference(run, stage, begun.age), place, remedy)
    return [replace(sample, reference_logprobs=logprobs) for sample, logprobs in zip(samples, reference, strict=True)]


def _of_behaviour(stage: StageStore) -> dict[str, Any]:
    """What behaviour logprobs belong to: the stage, which the weights at its start have sampled."""
    return {"stage": stage.content}


def _of_reference(run: Run, stage: StageStore, age: int) -> dict[str, Any]:
    """What reference logprobs belong to: the stage, and the run's weights before the update `age`."""
    return {"stage": stage.content, "run": run.record.id, "age": age}


def _behaviour_remedy(run: Run, stage: int) -> str:
    return (
        f"restore both from a copy, or remove them and the checkpoints after {checkpoint_name(Cursor(stage))} from "
        f"{run.directory.checkpoints}: the run then resumes at the stage's start and computes them again"
    )


def _formed_update(run: Run, stage: StageStore, number: int, age: int) -> list[Sample]:
    """The samples of the update taken at `age` of stage `number`; informative groups only where the recipe asks."""
    taken = update_at(run.recipe.run.seed, number, stage.updates, age)
    if run.recipe.objective.zero_variance != "leave_out":
        return _stored_update(run, stage, number, taken)
    per_update = run.recipe.rollout.prompts_per_update
    rewards, groups = stage.rewards()
    differs = np.zeros(groups.max() + 1, dtype=bool)
    differs[groups] = informative(rewards, groups)
    chosen = informative_updates(differs, per_update)[taken]
    stored = {place: _stored_update(run, stage, number, place) for place in sorted({*(chosen // per_update).tolist()})}
    return [
        replace(sample, group=place)  # a group that occurs twice in one update counts as two groups
        for place, group in enumerate(chosen.tolist())
        for sample in stored[group // per_update]
        if sample.group == group
    ]


def _stored_update(run: Run, stage: StageStore, number: int, update: int) -> list[Sample]:
    """The samples of an update as the stage holds it, with the behaviour logprobs that the recipe asks for."""
    samples = stage.read_update(update)
    if run.recipe.rollout.behaviour == "engine":
        return with_anchor(run, stage, number, update, samples)
    path = run.directory.behaviour(number)
    behaviour = read_logprobs(path, _of_behaviour(stage), update, _behaviour_remedy(run, number))
    samples = [
        replace(sample, behaviour_logprobs=own, engine_logprobs=sample.behaviour_logprobs)
        for sample, own in zip(samples, behaviour, strict=True)
    ]
    return with_anchor(run, stage, number, update, samples)


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
    found = {**metrics, "reward_mean": reward, **parts, **_utilization(learner, samples, metrics)}
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
        "Look at grad_norm and ratio_max before it in the report; a lower optimizer.lr is the usual way out"
    )
