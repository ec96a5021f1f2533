"""Training on a sealed stage: its batches, and what is logged, shown and profiled around its updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NoReturn

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from mugrpo_megatron.algorithm.advantages import before_penalty, informative
from mugrpo_megatron.errors import TrainingFailure
from mugrpo_megatron.files.durable import durable_file
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.update import token_logprobs
from mugrpo_megatron.observe.environment import learner_memory_peak, peak_flops, reset_peak_memory
from mugrpo_megatron.observe.metrics import MISMATCH_RESPONSES
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.batches import Batch, StageBatches, columns_of
from mugrpo_megatron.phases.column_passes import compute_behaviour, compute_ref, probe, refresh_proximal
from mugrpo_megatron.run.cursor import Cursor, nats_moved, stage_exhausted
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Sample, penalties, rewards_and_groups
from mugrpo_megatron.stages.schema import component_means, to_table
from mugrpo_megatron.weights.families import model_flops

MOST_SKIPPED = 10
"""A run ends after so many updates in a row with a non-finite gradient: one may be chance, ten mean a broken policy.
Overflows in float16 do not count."""
WANDB_SAMPLES = 16
"""The number of responses of each stage in the table that Weights & Biases gets."""


@contextmanager
def open_stage(run: Run, learner: Learner, cursor: Cursor) -> Iterator[TrainingStage]:
    """A block in which the cursor's sealed stage is trained on.

    Raises UserError when the stage's manifest is damaged; damage of its responses is found when an update reads them.
    """
    store = run.stage_store(cursor)
    columns = columns_of(run.recipe, run.directory, run.record.id, store, cursor.stage)
    # The bar and its phase must end before the next phase's bar begins, also when an update raises.
    with ExitStack() as display:
        yield TrainingStage(run, learner, StageBatches(run.recipe, store, cursor.stage, columns), display)


class TrainingStage:
    """A sealed stage during its updates. Every method but `holds` and `batch` is collective."""

    def __init__(self, run: Run, learner: Learner, batches: StageBatches, display: ExitStack) -> None:
        """`display` holds the progress bar and its phase, which end when it is closed."""
        self._run, self._learner, self._batches, self._display = run, learner, batches, display
        self._bar: Bar | None = None

    def compute_columns(self, cursor: Cursor) -> None:
        """Compute the learner's and the reference policy's columns that the stage's updates need and that are missing.

        It runs before the first update, while the learner has the weights that sampled the stage. Raises UserError when
        a column is damaged, was computed for another stage or policy, or is missing and cannot be computed again.
        """
        compute_behaviour(self._run, self._learner, self._batches, cursor)
        compute_ref(self._run, self._learner, self._batches, cursor)

    def record_start(self, cursor: Cursor) -> None:
        """Log a stage whose first update is next: its statistics, the mismatch of engine and learner if they had the
        same weights, some samples for Weights & Biases, and the first probe."""
        if cursor.age > 0:  # the run is resumed inside the stage, whose start it has logged before
            return
        run, store = self._run, self._batches.store
        logs_samples = run.is_main and run.recipe.track.wandb_project is not None
        samples = store.read_update(0, with_text=logs_samples)
        # Engine and learner can be compared only with the same weights. A branch may begin with later weights than
        # those that sampled the stage.
        same_weights = samples[0].weight_version == cursor.updates
        mismatch = _mismatch(run, self._learner, samples[:MISMATCH_RESPONSES], cursor) if same_weights else {}
        run.log.stage(cursor.stage, store.statistics() | mismatch)
        if logs_samples:
            names = ("group", "problem", "text", "gold", "extracted", "why", "reward", "finish_reason")
            rows = [{name: getattr(sample, name) for name in names} for sample in samples[:WANDB_SAMPLES]]
            run.log.samples(cursor.stage, rows)
        probe(run, self._learner, store, cursor, age=0)

    def holds(self, cursor: Cursor) -> bool:
        """Whether the cursor's update trains on this stage."""
        return cursor.stage == self._batches.stage

    def pause(self) -> None:
        """End the progress bar and the log's phase, for an evaluation; the next update begins new ones."""
        self._display.close()
        self._bar = None

    def refresh_proximal(self, cursor: Cursor) -> None:
        """Refresh the proximal policy every `objective.proximal_every` updates, if that is more than one
        (`column_passes.refresh_proximal`)."""
        refresh_proximal(self._run, self._learner, self._batches, cursor)

    def batch(self, cursor: Cursor) -> Batch:
        """Read what the update at the cursor trains on. Raises UserError if its responses are damaged, or if a column
        is missing or damaged."""
        return self._batches.batch(cursor)

    @contextmanager
    def measured(self, cursor: Cursor) -> Iterator[None]:
        """A block around an update, which is shown in a progress bar, and profiled if `track.profile_updates` says so.

        The bar covers the updates up to the stage's end or the next evaluation.
        """
        run = self._run
        if self._bar is None:
            self._bar = self._display.enter_context(_optimizing(run, self._batches.store.updates, cursor))
        with _profiled(run, cursor) if cursor.updates in run.recipe.track.profile_updates else nullcontext():
            yield

    def record(self, cursor: Cursor, batch: Batch, metrics: dict[str, float]) -> None:
        """Log the update, advance the bar, and probe the policy at the ages of `stages.probe.probe_ages`.

        Raises TrainingFailure, with the learner saved, after MOST_SKIPPED skipped updates in a row.
        """
        assert self._bar
        run, learner, store = self._run, self._learner, self._batches.store
        logged = _figures(batch.samples, cursor) | metrics | _utilization(learner, batch.samples, metrics)
        logged |= _kl_response(batch, metrics)
        run.log.update(cursor.stage, cursor.updates, cursor.age, logged)
        self._bar.advance(tokens=int(metrics["tokens"]), reward=logged["reward_mean"], loss=metrics["loss"])
        # Nobody else would notice: an update with a non-finite gradient is skipped without an error.
        if learner.skipped_in_a_row >= MOST_SKIPPED:
            _give_up(run, learner, cursor, cursor.advanced(run.recipe.schedule, store.updates), batch.samples)
        probe(run, learner, store, cursor, age=cursor.age + 1)

    def next_cursor(self, cursor: Cursor, batch: Batch, metrics: dict[str, float]) -> Cursor:
        """The cursor after the update. With `schedule.max_kl`, the next stage begins early once the policy is that many
        nats a response away from the one that sampled this stage."""
        run, schedule = self._run, self._run.recipe.schedule
        nats = nats_moved(cursor, _kl_response(batch, metrics))
        # Ranks must agree: each has summed the metrics itself, and sums on a GPU may differ in their last bits.
        exhausted = schedule.ends_early and run.world.any_rank(stage_exhausted(nats, schedule))
        if exhausted:
            run.display.say(
                f"stage {cursor.stage} ends after {cursor.age + 1} updates: the policy has moved {nats:.3g} nats a "
                f"response, and schedule.max_kl is {schedule.max_kl:g}"
            )
        return cursor.advanced(schedule, self._batches.store.updates, exhausted, nats)


def _kl_response(batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
    """The metric `kl_response`: the KL (k3) between behaviour and current policy, in nats, over a response of mean
    length. Empty if the update trained on no token."""
    if "kl_k3" not in metrics:  # the update had no token to train on
        return {}
    return {"kl_response": metrics["kl_k3"] * metrics["update_tokens"] / len(batch.samples)}


def _mismatch(run: Run, learner: Learner, samples: Sequence[Sample], cursor: Cursor) -> dict[str, float]:
    """Compute metrics of the difference between the log-probabilities of engine and learner, under the same weights.

    Empty if the samples have no token to train on, or if a response was imported without log-probabilities.
    """
    with run.phase("logprobs", cursor):
        logprobs = token_logprobs(learner, samples)
    learner_logprobs = np.concatenate([sample.trained(row) for sample, row in zip(samples, logprobs, strict=True)])
    engine_logprobs = np.concatenate([sample.trained(sample.engine_logprobs) for sample in samples])
    if not len(engine_logprobs) or np.isnan(engine_logprobs).any():
        return {}
    distance = np.abs(engine_logprobs - learner_logprobs)
    return {
        "mismatch_mean": float(distance.mean()),
        "mismatch_p99": float(np.quantile(distance, 0.99)),
        "mismatch_max": float(distance.max()),
    }


@contextmanager
def _optimizing(run: Run, stage_updates: int, cursor: Cursor) -> Iterator[Bar]:
    """Log the phase and show a bar for the updates up to the stage's end or the next evaluation."""
    every, updates = run.evaluates_every, cursor.updates_taken(run.recipe.schedule, stage_updates) - cursor.age
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
    """Profile the update in the block on every rank, for chrome://tracing or Perfetto."""
    path = run.directory.trace(cursor.updates, run.world.rank)
    path.parent.mkdir(exist_ok=True)
    with profile(activities=list(supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA})) as trace:
        yield
    path.unlink(missing_ok=True)  # in a run directory that somebody else made, it may be a link to another file
    trace.export_chrome_trace(str(path))
    run.display.say(f"the profile of update {cursor.updates} is in {path.parent}")


def _figures(samples: Sequence[Sample], cursor: Cursor) -> dict[str, float]:
    """The metrics that describe an update's responses: staleness, rewards, groups with equal rewards."""
    rewards, groups = rewards_and_groups(samples)
    zero_variance = ~informative(before_penalty(rewards, penalties(samples)), groups)
    return {
        "staleness": cursor.updates - samples[0].weight_version,
        "reward_mean": float(np.mean(rewards)),
        **component_means(sample.components for sample in samples),
        # The share of responses whose group has equal rewards. It is also the share of such groups, unless failed
        # responses were left out of a group.
        "zero_variance_fraction": float(zero_variance.mean()),
    }


def _utilization(learner: Learner, samples: Sequence[Sample], metrics: dict[str, float]) -> dict[str, float]:
    """The metrics `tflops` of the update and, if the device's peak is known, `mfu`."""
    ranks = learner.ranks
    flops = model_flops(learner.architecture, [sample.tokens for sample in samples], int(metrics["tokens"]))
    flops_per_second = flops / metrics["seconds"] / ranks.world
    peak = peak_flops(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None
    return {"tflops": flops_per_second / 1e12} | ({"mfu": flops_per_second / peak} if peak else {})


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
        f"update {cursor.age} of stage {cursor.stage} (both counted from 0). The learner is saved, the batch is in "
        f"{path}. Look at grad_norm, ratio_pos_max and ratio_neg_max of earlier updates in the report; a lower "
        "optimizer.lr is the usual way out"
    )
