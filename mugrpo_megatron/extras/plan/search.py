"""Compares layouts: which fit, how fast they are, why the others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mugrpo_megatron.checks.layouts import candidates, distance, layout_problems
from mugrpo_megatron.extras.plan.case import Case
from mugrpo_megatron.extras.plan.layout import Layout
from mugrpo_megatron.extras.plan.memory import RECOMPUTE, EngineMemory, engine_memory, memory
from mugrpo_megatron.extras.plan.time import update_seconds
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


def compare(case: Case, engine: EngineMemory) -> list[Candidate]:
    """Valid layouts, fastest first, then the refused ones, nearest to the recipe's first.

    Each layout has the fastest recompute choice that fits or, where none fits, the one that needs the least memory.
    """
    options = [_best(case, parallel, engine) for parallel in _worth_trying(case)]
    return sorted(options, key=lambda one: (bool(one.problems), one.distance if one.problems else one.seconds))


def _worth_trying(case: Case) -> Iterator[ParallelSection]:
    """Every candidate with at most twice the recipe's context parallelism."""
    for parallel in candidates(dict(case.config), case.cluster.world):
        if parallel.context <= 2 * case.recipe.parallel.context:
            yield parallel


def _best(case: Case, parallel: ParallelSection, engine: EngineMemory) -> Candidate:
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
        learner = case.recipe.learner.model_copy(update={"recompute": recompute})
        choice = trial.with_recipe(trial.recipe.model_copy(update={"learner": learner}))
        need = memory(choice, engine)
        seconds, refusals = update_seconds(choice), tuple(need.problems)
        choices.append(Candidate(choice.recipe, choice.layout, seconds, need.learn, refusals, away))
    fitting = [one for one in choices if not one.problems]
    return min(fitting, key=lambda one: one.seconds) if fitting else min(choices, key=lambda one: one.learn)


def nearest_fitting(found: list[Candidate]) -> Candidate | None:
    """The valid layout nearest to the recipe's; of equally near ones the fastest."""
    valid = [one for one in found if not one.problems]
    return min(valid, key=lambda one: (one.distance, one.seconds)) if valid else None


def fitting_engine(case: Case) -> int | None:
    """The smallest larger `engine.tensor` inside a node with which the recipe's own layout fits; None without one."""
    section, per_node = case.recipe.engine, case.cluster.per_node
    for tensor in range(section.tensor + 1, per_node + 1 if section.nodes == 1 else 0):
        trial = case.with_recipe(
            case.recipe.model_copy(update={"engine": section.model_copy(update={"tensor": tensor})})
        )
        if per_node % tensor or any(layout_problems(trial.recipe, dict(case.config), case.cluster.world)):
            continue
        if memory(trial, engine_memory(trial)).fits:
            return tensor
    return None


def recipe_keys(recipe: Recipe, other: Recipe) -> str:
    """The layout and the recompute choice of `other` as `--set` options to `recipe`."""
    keys = [
        f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for section in ("parallel", "learner")
        for key, value in getattr(other, section).model_dump().items()
        if value != getattr(getattr(recipe, section), key)
    ]
    return " ".join(f"--set {key}" for key in keys)
