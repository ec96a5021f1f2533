"""What sampling the next stage ahead saves (`schedule.max_sample_age`): other devices do it while the learner trains.

A stage then takes the longer of two things: its own updates, or the sampling of the next stage, which begins `prefetch`
updates before this one ends. The first stage is sampled by the learner's own engines, as without prefetch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.case import Case
from mugrpo_megatron.extras.plan.hardware import Cluster
from mugrpo_megatron.extras.plan.memory import engine_memory, memory
from mugrpo_megatron.extras.plan.time import Phases, decoding_seconds, evaluations, phases, scoring_seconds, sync_bytes
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.checks import layout_problems

MOST_EXTRA = 64
"""Nodes for generation beside the learner's that are tried at most."""


@dataclass(frozen=True, slots=True)
class Split:
    """A run whose learner has some devices and whose engines of later stages have others."""

    training: int
    """Devices of the learner."""
    generating: int
    """Devices of the other engines."""
    prefetch: int
    """Updates before a stage's end at which the next one is sampled: the staleness that its responses start at."""
    longest_staleness: int
    """Of the last update on a stage."""
    wait: float
    """Seconds for which the learner waits at the end of each stage but the last."""
    rollout: float
    """Seconds of the whole run for which the learner does not train: the first stage's sampling, and the waits."""
    train: float
    evaluate: float
    save: float

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.rollout + self.train + self.evaluate + self.save

    @property
    def device_seconds(self) -> float:
        return (self.training + self.generating) * self.seconds


def best_split(case: Case) -> Split | None:
    """The fastest way to divide the cluster's devices; None where no division runs, or prefetch is out of place.

    Whole nodes; on one node its devices. Prefetch is the recipe's or, where that is 0, as many updates as help.
    """
    found = []
    for training, generating in _divisions(case.cluster):
        if (own := _learner(case, training)) and (split := _split(case, own, training, generating)):
            found.append(split)
    return min(found, key=lambda split: (split.seconds, split.generating), default=None)


def hiding_split(case: Case) -> Split | None:
    """The learner on the whole cluster, and the fewest further nodes with which it never waits; None if too many."""
    own = _learner(case, case.cluster)
    if own is None:
        return None
    for nodes in range(1, MOST_EXTRA + 1):
        split = _split(case, own, case.cluster, replace(case.cluster, nodes=nodes))
        if split and split.wait == 0:
            return split
    return None


def _possible(recipe: Recipe) -> bool:
    """Whether a recipe has a next stage, ends its stages at known updates and takes logprobs from the engine.

    The recipe's own checks refuse `schedule.max_sample_age` otherwise.
    """
    schedule = recipe.schedule
    sampled = recipe.rollout.behaviour == "engine" and recipe.learner.routing_replay != "learner"
    return schedule.stages > 1 and not schedule.ends_early and sampled


def _divisions(cluster: Cluster) -> Iterator[tuple[Cluster, Cluster]]:
    whole = cluster.nodes > 1
    units = cluster.nodes if whole else cluster.per_node

    def part(size: int) -> Cluster:
        return replace(cluster, nodes=size) if whole else replace(cluster, per_node=size)

    for own in range(1, units):
        yield part(own), part(units - own)


def _on(case: Case, cluster: Cluster) -> Case:
    """The case on another cluster, in its recipe's layout there."""
    return replace(case, cluster=cluster).with_recipe(case.recipe)


def _learner(case: Case, training: Cluster) -> Phases | None:
    """A stage of the run on the learner's devices alone; None if it cannot run there."""
    if not _possible(case.recipe) or any(layout_problems(case.recipe, dict(case.config), training.world)):
        return None
    learner = _on(case, training)
    try:
        need = memory(learner, engine_memory(learner))
        return phases(learner, need) if need.fits else None
    except UserError:  # its ranks cannot be divided into engines
        return None


def _split(case: Case, own: Phases, training: Cluster, generating: Cluster) -> Split | None:
    """The run in that division; None if the devices of `generating` cannot be divided into engines."""
    schedule = case.recipe.schedule
    try:
        sampling = sampling_seconds(_on(case, generating))
    except UserError:
        return None
    update = own.optimize / schedule.updates_on_stage
    prefetch = schedule.max_sample_age or min(schedule.updates_on_stage, math.ceil(sampling / update))
    wait = max(0.0, sampling - prefetch * update)
    before, _ = evaluations(case.recipe)
    first = own.switch + own.sync + own.generate + own.score
    woken = (before - 1) * (own.switch + own.sync)  # the learner's engines sleep when a later stage begins
    return Split(
        training=training.world,
        generating=generating.world,
        prefetch=prefetch,
        longest_staleness=prefetch + schedule.updates_on_stage - 1,
        wait=wait,
        rollout=first + (schedule.stages - 1) * wait,
        train=schedule.stages * (own.logprobs + own.optimize),
        evaluate=schedule.stages * own.evaluate + woken,
        save=schedule.stages * own.save,
    )


def sampling_seconds(others: Case) -> float:
    """Seconds from the learner's copy of its weights to the sealed stage, on the devices of `others`.

    The weights go over the disk: written once, read once by each node.
    """
    responses = others.recipe.schedule.updates_per_stage * others.responses
    generate = decoding_seconds(responses, others, engine_memory(others))
    moved = sync_bytes(others) * (1 + others.cluster.nodes) / others.assumptions.disk
    return moved + others.assumptions.wake + max(generate, scoring_seconds(responses, others))
