"""Optimization: a sealed stage with its columns, and everything around its updates that is shown and logged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from mugrpo_megatron.algorithm.advantages import group_advantages, informative
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import TrainingFailure
from mugrpo_megatron.files.durable import durable_file
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import token_logprobs
from mugrpo_megatron.observe.environment import learner_memory_peak, peak_flops, reset_peak_memory
from mugrpo_megatron.observe.metrics import MISMATCH_RESPONSES
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.batches import Batch, StageBatches, columns_of
from mugrpo_megatron.phases.column_passes import compute_ref_logprobs, record_behaviour, refresh_proximal
from mugrpo_megatron.phases.evaluate import evaluate_if_due
from mugrpo_megatron.phases.saves import save_if_due
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.cursor import Cursor, nats_moved, stage_exhausted
from mugrpo_megatron.run.leader import Engines
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.probe import Probed, probe_ages, write_age, write_responses
from mugrpo_megatron.stages.schema import component_means, to_table
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import model_flops

MOST_SKIPPED = 10
"""Updates in a row with a non-finite gradient that end a run: one may be chance, ten are a policy that is lost."""
WANDB_SAMPLES = 16
"""Responses of each stage in a table of Weights & Biases."""
PROBED = 32
"""Responses of a stage that the probe follows, the rows of a heat map: nine forward passes over them a stage."""
PLACES = 4
"""Updates of the stage, evenly spaced, from which the responses are taken."""
NEGATIVE = 0.75
"""Share of the responses with negative advantage: only those can be vetoed."""

Chosen = list[tuple[int, Sample, float]]
"""Responses with their update and their advantage."""


@contextmanager
def open_stage(run: Run, learner: Learner, engines: Engines, cursor: Cursor) -> Iterator[TrainingStage]:
    """Open the cursor's sealed stage, log it where it is new, and compute the columns that its updates need.

    Collective. Raises UserError when a column is damaged or belongs to something else, or is missing and cannot be
    computed again.
    """
    store = run.stage_store(cursor)
    columns = columns_of(run.recipe, run.directory, run.record.id, store, cursor.stage)
    batches = StageBatches(run.recipe, store, cursor.stage, columns)
    _record_stage(run, learner, store, cursor)
    record_behaviour(run, learner, batches, cursor)
    compute_ref_logprobs(run, learner, batches, cursor)
    with ExitStack() as display:
        yield TrainingStage(run, learner, engines, batches, display)


class TrainingStage:
    """A sealed stage during its updates. Every method but `holds` is collective."""

    def __init__(self, run: Run, learner: Learner, engines: Engines, batches: StageBatches, display: ExitStack) -> None:
        """`display` ends the progress bar and the profiler."""
        self._run, self._learner, self._engines, self._batches = run, learner, engines, batches
        self._display, self._profile = display, ExitStack()
        self._bar: Bar | None = None

    def holds(self, cursor: Cursor) -> bool:
        """Whether the cursor's update trains on this stage."""
        return cursor.stage == self._batches.stage

    def evaluate_if_due(self, cursor: Cursor) -> None:
        """Evaluate before the update at the cursor, where the recipe asks for it."""
        if cursor.due(self._run.evaluates_every):
            self._display.close()  # two bars at once would overwrite each other
            self._bar = None
        evaluate_if_due(self._run, self._learner, self._engines, cursor)

    def batch(self, cursor: Cursor) -> Batch:
        """Returns what the update at the cursor trains on; starts the progress bar and the profiler where due."""
        if self._bar is None:
            self._bar = self._display.enter_context(_optimizing(self._run, self._batches.store.updates, cursor))
        refresh_proximal(self._run, self._learner, self._batches, cursor)
        batch = self._batches.batch(cursor)
        if cursor.updates in self._run.recipe.track.profile_updates:
            self._profile = self._display.enter_context(ExitStack())
            self._profile.enter_context(_profiled(self._run, cursor))
        return batch

    def record(self, cursor: Cursor, batch: Batch, metrics: dict[str, float]) -> None:
        """Log the update and advance the bar.

        Raises TrainingFailure, with the learner saved, after MOST_SKIPPED skipped updates in a row.
        """
        assert self._bar
        self._profile.close()
        run, learner, store = self._run, self._learner, self._batches.store
        logged = _figures(batch.samples, cursor) | metrics | _utilization(learner, batch.samples, metrics)
        logged |= _kl_response(batch, metrics)
        run.log.update(cursor.stage, cursor.updates, cursor.age, logged)
        self._bar.advance(tokens=int(metrics["tokens"]), reward=logged["reward_mean"], loss=metrics["loss"])
        if learner.skipped_in_a_row >= MOST_SKIPPED:
            _give_up(run, learner, cursor, cursor.advanced(run.recipe.schedule, store.updates), batch.samples)
        probe(run, learner, store, cursor, age=cursor.age + 1)

    def next_cursor(self, cursor: Cursor, batch: Batch, metrics: dict[str, float]) -> Cursor:
        """Returns the cursor after the update; with `schedule.max_kl` a stage that the policy has left ends early."""
        run, schedule = self._run, self._run.recipe.schedule
        nats = nats_moved(cursor, _kl_response(batch, metrics))
        # Each rank has summed the metrics itself, and sums on a GPU may differ in their last bits.
        exhausted = schedule.ends_early and run.world.any_rank(stage_exhausted(nats, schedule))[0]
        if exhausted:
            run.display.say(
                f"stage {cursor.stage} ends after {cursor.age + 1} updates: the policy has moved {nats:.3g} nats a "
                f"response, and schedule.max_kl is {schedule.max_kl:g}"
            )
        return cursor.advanced(schedule, self._batches.store.updates, exhausted, nats)

    def save_if_due(self, cursor: Cursor) -> None:
        """Save the learner where that is due, so that the run would resume at the cursor."""
        save_if_due(self._run, cursor)


def _kl_response(batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
    """The metric `kl_response`: nats between the behaviour policy and the policy, k3 summed over a mean response."""
    if "kl_k3" not in metrics:  # an update without a token to train on
        return {}
    return {"kl_response": metrics["kl_k3"] * metrics["update_tokens"] / len(batch.samples)}


def _record_stage(run: Run, learner: Learner, stage: StageStore, cursor: Cursor) -> None:
    """Log a new stage: its statistics, by how much engine and learner differ on the same weights, and samples of it.

    A stage that earlier weights have sampled has no such figure: the learner's are later ones.
    """
    if cursor.age > 0:
        return  # the weights have changed; it was done at the stage's start
    shows = run.is_main and run.recipe.track.wandb_project is not None
    samples = stage.read_update(0, whole=shows)
    same = samples[0].weight_version == cursor.updates
    mismatch = _mismatch(run, learner, samples[:MISMATCH_RESPONSES], cursor) if same else {}
    run.log.stage(cursor.stage, stage.statistics() | mismatch)
    if shows:
        run.log.samples(cursor.stage, _shown(samples[:WANDB_SAMPLES]))
    probe(run, learner, stage, cursor, age=0)


def _mismatch(run: Run, learner: Learner, samples: Sequence[Sample], cursor: Cursor) -> dict[str, float]:
    """By how much engine and learner differ; empty for responses that were imported without logprobs."""
    with run.log.phase("logprobs", cursor.stage):
        own = token_logprobs(learner, samples)
    learners = np.concatenate([sample.trained(logprobs) for sample, logprobs in zip(samples, own, strict=True)])
    engines = np.concatenate([sample.trained(sample.engine_logprobs) for sample in samples])
    if not len(engines) or np.isnan(engines).any():
        return {}
    distance = np.abs(engines - learners)
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
def _optimizing(run: Run, stage_updates: int, cursor: Cursor) -> Iterator[Bar]:
    """The phase's wall-clock and a bar around the updates up to the stage's end or the next evaluation."""
    every, updates = run.evaluates_every, cursor.stage_length(run.recipe.schedule, stage_updates) - cursor.age
    updates = min(updates, every - cursor.age % every) if every else updates
    reset_peak_memory()
    with (
        run.phase("optimize", cursor) as facts,
        run.display.bar(f"{cursor.title(run.recipe.schedule)}: optimize", updates, "updates") as bar,
    ):
        yield bar
        facts["tokens"] = float(bar.tokens)
        facts["learner_memory_peak"] = max(run.world.gather(learner_memory_peak()))


@contextmanager
def _profiled(run: Run, cursor: Cursor) -> Iterator[None]:
    """Record the update inside, on every rank; it takes longer than others. For chrome://tracing or Perfetto."""
    path = run.directory.trace(cursor.updates, run.world.ranks.rank)
    path.parent.mkdir(exist_ok=True)
    with profile(activities=list(supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA})) as trace:
        yield
    trace.export_chrome_trace(str(path))
    run.display.say(f"the profile of update {cursor.updates} is in {path.parent}")


def _figures(samples: Sequence[Sample], cursor: Cursor) -> dict[str, float]:
    """What an update's row says of its responses."""
    rewards, groups = np.array([s.reward for s in samples]), np.array([s.group for s in samples])
    alike = ~informative(rewards, groups)
    return {
        "staleness": cursor.updates - samples[0].weight_version,
        "reward_mean": float(np.mean(rewards)),
        **component_means(sample.components for sample in samples),
        "zero_variance_fraction": float(alike.mean()),  # of groups too: all have as many responses
    }


def _utilization(learner: Learner, samples: Sequence[Sample], metrics: dict[str, float]) -> dict[str, float]:
    """The update's FLOP per second and device, and its share of the device's peak where that is known."""
    ranks = learner.ranks
    flops = model_flops(learner.architecture, [sample.tokens for sample in samples], int(metrics["tokens"]))
    reached = flops / metrics["seconds"] / ranks.world
    peak = peak_flops(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None
    return {"tflops": reached / 1e12} | ({"mfu": reached / peak} if peak else {})


def _give_up(run: Run, learner: Learner, cursor: Cursor, after: Cursor, samples: Sequence[Sample]) -> NoReturn:
    run.saver.save(after)
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


def probe(run: Run, learner: Learner, stage: StageStore, cursor: Cursor, age: int) -> None:
    """Score the probed responses of the stage after `age` of its updates, at the ages of a probe. Collective.

    A forward pass of the learner that draws no random number and changes no state: training goes on bit by bit as
    without it. It is taken before the checkpoint of the same update, so a run that resumes has every earlier age.
    """
    length = cursor.stage_length(run.recipe.schedule, stage.updates)
    if age not in probe_ages(length):
        return
    directory = run.directory.probe(cursor.stage)
    with run.log.phase("probe", cursor.stage):
        chosen = probed(stage, run.recipe)
        logprobs = token_logprobs(learner, [sample for _, sample, _ in chosen])
        if run.is_main and age == 0:
            write_responses(directory, _described(chosen, run.recipe))
        if run.is_main:
            write_age(directory, age, logprobs)


def probed(stage: StageStore, recipe: Recipe) -> Chosen:
    """At most PROBED responses, from PLACES updates, evenly spaced in each; always the same ones."""
    updates = sorted({part * stage.updates // PLACES for part in range(PLACES)})
    each, more = divmod(PROBED, len(updates))
    chosen: Chosen = []
    for place, update in enumerate(updates):
        samples = stage.read_update(update)
        rewards, groups = np.array([s.reward for s in samples]), np.array([s.group for s in samples])
        advantages = group_advantages(rewards, groups, recipe.objective)
        for index in _choice(advantages, each + (place < more)):
            chosen.append((update, samples[index], float(advantages[index])))
    return chosen


def _choice(advantages: np.ndarray, count: int) -> list[int]:
    """At most `count` indices: NEGATIVE of them with negative advantage, where there are so many."""
    negative, others = np.flatnonzero(advantages < 0), np.flatnonzero(advantages >= 0)
    few = min(len(negative), max(round(NEGATIVE * count), count - len(others)))
    return sorted([*_spaced(negative, few), *_spaced(others, min(len(others), count - few))])


def _spaced(indices: np.ndarray, count: int) -> list[int]:
    return [int(indices[place * len(indices) // count]) for place in range(count)]


def _described(chosen: Chosen, recipe: Recipe) -> Sequence[Probed]:
    """The responses as the report shows them, with each token as text."""
    tokenizer = load_tokenizer(recipe.model.directory)
    known = sorted({int(token) for _, sample, _ in chosen for token in sample.response_ids})
    text = dict(zip(known, tokenizer.batch_decode([[token] for token in known]), strict=True))
    return [
        Probed(
            update=update,
            group=sample.group,
            problem=sample.problem,
            reward=sample.reward,
            advantage=advantage,
            tokens=[text[int(token)] for token in sample.response_ids],
            engine_logprobs=sample.engine_logprobs,
            mask=None if sample.loss_mask is None else sample.loss_mask.tolist(),
        )
        for update, sample, advantage in chosen
    ]
