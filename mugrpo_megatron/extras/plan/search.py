"""Other ways to run a plan's recipe: layouts and engines that fit, and their speed; devices divided for prefetching."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mugrpo_megatron.checks.layouts import candidates, distance, divisors, layout_problems, other_problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.case import Layout, PlanCase
from mugrpo_megatron.extras.plan.decoding import decoding_seconds
from mugrpo_megatron.extras.plan.hardware import Cluster
from mugrpo_megatron.extras.plan.memory import RECOMPUTE, EngineMemory, engine_memory, memory, rest_bytes
from mugrpo_megatron.extras.plan.time import Phases, evaluations, phases, scoring_seconds, sync_bytes, update_seconds
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import ParallelSection


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout of the learner on the cluster."""

    recipe: Recipe
    """The planned recipe in this layout."""
    layout: Layout
    seconds: float
    """Of one update."""
    learn: float
    """Bytes of the learner phase on its fullest rank."""
    problems: tuple[str, ...]
    """Why it is refused; empty where it is valid."""
    distance: float
    """From the recipe's own layout."""


def compare(case: PlanCase, engine: EngineMemory) -> list[Candidate]:
    """Valid layouts, fastest first, then the refused ones, nearest to the recipe's first.

    Tried is every candidate with at most twice the recipe's context parallelism. Each layout has the fastest recompute
    choice that fits or, where none fits, the one that needs the least memory.
    """
    most = 2 * case.recipe.parallel.context
    layouts = candidates(dict(case.config), case.cluster.world)
    options = [_best(case, parallel, engine) for parallel in layouts if parallel.context <= most]
    return sorted(options, key=lambda one: (bool(one.problems), one.distance if one.problems else one.seconds))


def _best(case: PlanCase, parallel: ParallelSection, engine: EngineMemory) -> Candidate:
    away = distance(parallel, case.recipe.parallel)
    trial = case.with_recipe(case.recipe.model_copy(update={"parallel": parallel}))
    world, per_node = case.cluster.world, case.cluster.per_node
    problems = list(layout_problems(trial.recipe, dict(case.config), world))
    if parallel.tensor > per_node:
        problems.append(f"tensor {parallel.tensor} would leave the node, which has {per_node} devices")
    if problems:
        return Candidate(trial.recipe, trial.layout, float("inf"), 0.0, tuple(problems), away)
    choices = []
    for recompute in RECOMPUTE:
        choice = trial.changed("learner", recompute=recompute)
        need = memory(choice, engine)
        seconds, refusals = update_seconds(choice), tuple(need.problems)
        choices.append(Candidate(choice.recipe, choice.layout, seconds, need.learn, refusals, away))
    fitting = [one for one in choices if not one.problems]
    return min(fitting, key=lambda one: one.seconds) if fitting else min(choices, key=lambda one: one.learn)


FRACTIONS = tuple(percent / 100 for percent in range(95, 15, -5))
"""Values of engine.memory_fraction that are tried besides the recipe's."""


def fitting(case: PlanCase) -> PlanCase | None:
    """The fastest way to run the recipe's batch and schedule on the cluster; None where none fits.

    Tried together: `engine.tensor` and `engine.memory_fraction`; for each size of engines the layout nearest to the
    recipe's that fits, of equally near ones the fastest, with any recomputation, and where none does with shorter rows.
    """
    ways = []
    for engines in _engines_that_fit(case):
        for trial in (engines, _with_short_rows(engines)):
            if valid := [one for one in compare(trial, engine_memory(trial)) if not one.problems]:
                ways.append(trial.with_recipe(min(valid, key=lambda one: (one.distance, one.seconds)).recipe))
                break
    return min(ways, key=lambda way: phases(way, memory(way, engine_memory(way))).total, default=None)


def _engines_that_fit(case: PlanCase) -> Iterator[PlanCase]:
    """The case with engines of each size that can run: the share of the device is the recipe's or the nearest below."""
    section = case.recipe.engine
    sizes = divisors(case.cluster.per_node) if section.nodes == 1 else [section.tensor]
    lower = [fraction for fraction in FRACTIONS if fraction < section.memory_fraction]
    higher = [fraction for fraction in reversed(FRACTIONS) if fraction > section.memory_fraction]
    for tensor in sizes:
        for fraction in (section.memory_fraction, *lower, *higher):
            trial = case.changed("engine", tensor=tensor, memory_fraction=fraction)
            if _engine_fits(trial):
                yield trial
                break


def _engine_fits(case: PlanCase) -> bool:
    """Whether the recipe's engines can run on the cluster while the learner is offloaded."""
    if any(other_problems(case.recipe, dict(case.config))):
        return False
    try:
        engine = engine_memory(case)
    except UserError:  # the ranks of a node cannot be divided into engines
        return False
    return engine.requests >= 1 and (not case.cuda or engine.total + rest_bytes(case) <= case.cluster.device.memory)


def _with_short_rows(case: PlanCase) -> PlanCase:
    """The case with packed rows as short as its longest sequence."""
    recipe = case.recipe
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    return case.changed("learner", micro_batch_tokens=min(longest, recipe.learner.micro_batch_tokens))


def recipe_keys(recipe: Recipe, other: Recipe) -> str:
    """The layout, engines, recomputation and packed rows of `other` as `--set` options to `recipe`."""
    keys = [
        f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for section in ("parallel", "engine", "learner")
        for key, value in getattr(other, section).model_dump().items()
        if value != getattr(getattr(recipe, section), key)
    ]
    return " ".join(f"--set {key}" for key in keys)


MOST_EXTRA = 64
"""Nodes for generation beside the learner's that are tried at most."""


@dataclass(frozen=True, slots=True)
class DeviceSplit:
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


def best_split(case: PlanCase) -> DeviceSplit | None:
    """The fastest way to divide the cluster's devices; None where no division runs, or prefetch is out of place.

    Whole nodes; on one node its devices. Prefetch is the recipe's or, where that is 0, as many updates as help.
    """
    splits = []
    for training, generating in _divisions(case.cluster):
        if (own := _learner(case, training)) and (split := _split(case, own, training, generating)):
            splits.append(split)
    return min(splits, key=lambda split: (split.seconds, split.generating), default=None)


def hiding_split(case: PlanCase) -> DeviceSplit | None:
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


def _on(case: PlanCase, cluster: Cluster) -> PlanCase:
    """The case on another cluster, in its recipe's layout there."""
    return replace(case, cluster=cluster).with_recipe(case.recipe)


def _learner(case: PlanCase, training: Cluster) -> Phases | None:
    """A stage of the run on the learner's devices alone; None if it cannot run there."""
    if not _possible(case.recipe) or any(layout_problems(case.recipe, dict(case.config), training.world)):
        return None
    learner = _on(case, training)
    try:
        need = memory(learner, engine_memory(learner))
        return phases(learner, need) if need.fits else None
    except UserError:  # its ranks cannot be divided into engines
        return None


def _split(case: PlanCase, own: Phases, training: Cluster, generating: Cluster) -> DeviceSplit | None:
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
    return DeviceSplit(
        training=training.world,
        generating=generating.world,
        prefetch=prefetch,
        longest_staleness=prefetch + schedule.updates_on_stage - 1,
        wait=wait,
        rollout=first + (schedule.stages - 1) * wait,
        train=schedule.stages * (own.auxiliary + own.logprobs + own.optimize),
        evaluate=schedule.stages * own.evaluate + woken,
        save=schedule.stages * own.save,
    )


def sampling_seconds(others: PlanCase) -> float:
    """Seconds from the learner's copy of its weights to the sealed stage, on the devices of `others`.

    The weights go over the disk: written once, read once by each node.
    """
    responses = others.recipe.schedule.updates_per_stage * others.responses
    generate = decoding_seconds(responses, others, engine_memory(others))
    moved = sync_bytes(others) * (1 + others.cluster.nodes) / others.assumptions.disk
    return moved + others.assumptions.wake + max(generate, scoring_seconds(responses, others))
