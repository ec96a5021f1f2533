"""Other layouts and engines for a plan's recipe: which of them fit, and how fast they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mugrpo_megatron.checks.layouts import (
    candidates,
    divisors,
    layout_distance,
    layout_problems,
    problems_of_any_layout,
)
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.lora.lora_checks import check_lora
from mugrpo_megatron.extras.plan.case import Layout, PlanCase
from mugrpo_megatron.extras.plan.memory import RECOMPUTE, EngineMemory, Memory, engine_memory, memory, rest_bytes
from mugrpo_megatron.extras.plan.time import phases, update_seconds
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import ParallelSection


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout of the learner on the cluster."""

    recipe: Recipe
    """The planned recipe in this layout."""
    layout: Layout
    seconds: float
    """Seconds of one update; infinite for a layout that cannot exist."""
    learn: float
    """Bytes of the learner phase on its fullest rank; 0 for a layout that cannot exist."""
    problems: tuple[str, ...]
    """Reasons for a refusal; empty for a valid layout."""
    distance: float
    """Distance from the recipe's own layout (`layout_distance`)."""


def compare_layouts(case: PlanCase, engine: EngineMemory) -> list[Candidate]:
    """Try layouts of the cluster's ranks: returns the valid ones, fastest first, then the refused ones, nearest first.

    A refused layout is near if it differs little from the recipe's. Layouts with more than twice the recipe's context
    parallelism are not tried. Each layout gets the fastest choice of recomputation that fits, or, if none fits, the one
    that needs the least memory.
    """
    most = 2 * case.recipe.parallel.context
    layouts = candidates(dict(case.config), case.cluster.world)
    options = [_best(case, parallel, engine) for parallel in layouts if parallel.context <= most]
    return sorted(
        options,
        key=lambda candidate: (
            bool(candidate.problems),
            candidate.distance if candidate.problems else candidate.seconds,
        ),
    )


def _best(case: PlanCase, parallel: ParallelSection, engine: EngineMemory) -> Candidate:
    away = layout_distance(parallel, case.recipe.parallel)
    trial = case.with_recipe(case.recipe.model_copy(update={"parallel": parallel}))
    world, per_node = case.cluster.world, case.cluster.per_node
    problems = list(layout_problems(parallel, case.recipe.rollout, dict(case.config), world))
    if parallel.tensor > per_node:
        problems.append(f"tensor {parallel.tensor} would leave the node, which has {per_node} devices")
    if problems:
        return Candidate(trial.recipe, trial.layout, float("inf"), 0.0, tuple(problems), away)
    choices = []
    for recompute in RECOMPUTE:
        choice = trial.with_keys("learner", recompute=recompute)
        need = memory(choice, engine)
        seconds, refusals = update_seconds(choice), tuple(need.problems)
        choices.append(Candidate(choice.recipe, choice.layout, seconds, need.learn, refusals, away))
    fitting = [candidate for candidate in choices if not candidate.problems]
    return (
        min(fitting, key=lambda candidate: candidate.seconds)
        if fitting
        else min(choices, key=lambda candidate: candidate.learn)
    )


FRACTIONS = tuple(percent / 100 for percent in range(95, 15, -5))
"""Values of engine.memory_fraction that are tried besides the recipe's."""


def fastest_fit(case: PlanCase) -> PlanCase | None:
    """The fastest way to run the recipe's batch and schedule on the cluster; None if nothing fits.

    For each `engine.tensor` that works with some `engine.memory_fraction`, it takes the layout that fits and is nearest
    to the recipe's, and of equally near ones the fastest; the choice of recomputation may differ from the recipe's. If
    no layout fits, it tries shorter packed rows. The fastest of these cases is returned.
    """
    cases = []
    for engines in _engines_that_fit(case):
        for trial in (engines, _with_short_rows(engines)):
            if valid := [
                candidate for candidate in compare_layouts(trial, engine_memory(trial)) if not candidate.problems
            ]:
                cases.append(
                    trial.with_recipe(min(valid, key=lambda candidate: (candidate.distance, candidate.seconds)).recipe)
                )
                break
    return min(cases, key=_stage_seconds, default=None)


ADAPTER_RANK = 32
"""Rank of the adapters that a plan advises; `one_gpu/80gb-lora.toml` has the same."""


def fit_with_adapters(case: PlanCase) -> PlanCase | None:
    """`fastest_fit` of the case with `[lora]`; None if the recipe has adapters already, if nothing fits, or if the
    model cannot have adapters of ADAPTER_RANK."""
    if case.recipe.lora.rank is not None:
        return None
    try:
        fit = fastest_fit(case.with_keys("lora", rank=ADAPTER_RANK))
        if fit:
            check_lora(fit.recipe, case.architecture)
    except UserError:
        return None
    return fit


MOST_NODES = 32
"""`fewest_devices` tries up to this many times the cluster's nodes."""


def fewest_devices(case: PlanCase) -> PlanCase | None:
    """`fastest_fit` on the fewest devices that suffice; None if none of the sizes that are tried does.

    If the cluster is a single node, one node with more devices (2, 4 or 8) is tried first. Then 2, 4, 8, ... times the
    nodes are tried; in place of a single node, these are nodes with at least 8 devices. None on CPU, where more ranks
    would share the same memory.
    """
    if not case.cuda:
        return None
    nodes, per_node = case.cluster.nodes, case.cluster.per_node
    sizes = [(1, size) for size in (2, 4, 8) if nodes == 1 and size > per_node]
    per_node = max(8, per_node) if nodes == 1 else per_node
    factors = (2**power for power in range(1, MOST_NODES.bit_length()))
    sizes += [(nodes * factor, per_node) for factor in factors]
    return next((fit for size in sizes if (fit := fastest_fit(case.on_cluster(*size)))), None)


TIGHT = 0.95
"""A plan that takes more than this share of a device is tight: its figures may be wrong by the remaining 5 %."""


def is_tight(need: Memory) -> bool:
    """Whether the fullest phase takes more of its device than a plan's figures can promise."""
    return need.peak > TIGHT * need.device


class Roomier(NamedTuple):
    """A setting with which no phase is tight."""

    keys: str
    """The setting as a `--set` option."""
    peak: float
    """Bytes of the fullest phase."""


def roomier(case: PlanCase) -> Roomier | None:
    """The fastest change of one setting that leaves 5 % of the device free in every phase; None if there is none.

    Tried are more recomputation, shorter packed rows and smaller values of engine.memory_fraction.
    """
    recipe, cases = case.recipe, list[tuple[PlanCase, float]]()
    longest = recipe.longest_training_sequence
    rows = recipe.learner.micro_batch_tokens
    trials: list[tuple[str, dict[str, Any]]] = [
        *(("learner", {"recompute": choice}) for choice in RECOMPUTE[RECOMPUTE.index(recipe.learner.recompute) + 1 :]),
        *(("learner", {"micro_batch_tokens": rows // n}) for n in (2, 4, 8) if rows // n >= longest),
        *(("engine", {"memory_fraction": part}) for part in FRACTIONS if part < recipe.engine.memory_fraction),
    ]
    for section, keys in trials:
        trial = case.with_keys(section, **keys)
        need = memory(trial, engine_memory(trial))
        if need.fits and not is_tight(need):
            cases.append((trial, need.peak))
    best = min(cases, key=lambda found: _stage_seconds(found[0]), default=None)
    return Roomier(recipe_keys(recipe, best[0].recipe), best[1]) if best else None


def _stage_seconds(case: PlanCase) -> float:
    return phases(case, memory(case, engine_memory(case))).total


def _engines_that_fit(case: PlanCase) -> Iterator[PlanCase]:
    """Yield the case with each `engine.tensor` with which its engines can run; engines of several nodes keep theirs.

    `engine.memory_fraction` is the recipe's, else the nearest lower one that works, else the nearest higher one.
    """
    section = case.recipe.engine
    sizes = divisors(case.cluster.per_node) if section.nodes == 1 else [section.tensor]
    lower = [fraction for fraction in FRACTIONS if fraction < section.memory_fraction]
    higher = [fraction for fraction in reversed(FRACTIONS) if fraction > section.memory_fraction]
    for tensor in sizes:
        for fraction in (section.memory_fraction, *lower, *higher):
            trial = case.with_keys("engine", tensor=tensor, memory_fraction=fraction)
            if _engine_fits(trial):
                yield trial
                break


def _engine_fits(case: PlanCase) -> bool:
    """Whether the recipe's engines can run on the cluster while the learner is offloaded."""
    if any(problems_of_any_layout(case.recipe, dict(case.config))):
        return False
    try:
        engine = engine_memory(case)
    except UserError:  # the ranks or nodes cannot be divided into engines
        return False
    return engine.requests >= 1 and (not case.cuda or engine.total + rest_bytes(case) <= case.cluster.device.memory)


def _with_short_rows(case: PlanCase) -> PlanCase:
    """The case with packed rows that are only as long as its longest sequence."""
    recipe = case.recipe
    longest = recipe.longest_training_sequence
    return case.with_keys("learner", micro_batch_tokens=min(longest, recipe.learner.micro_batch_tokens))


def recipe_keys(recipe: Recipe, other: Recipe) -> str:
    """The `--set` options that give `recipe` the adapters, layout, engines and learner settings of `other`."""
    keys = [
        f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for section in ("lora", "parallel", "engine", "learner")
        for key, value in getattr(other, section).model_dump().items()
        if value != getattr(getattr(recipe, section), key)
    ]
    return " ".join(f"--set {key}" for key in keys)
