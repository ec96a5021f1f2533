"""Layouts compared: which fit, how fast they are, why the others are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mugrpo_megatron.plan.cluster import Assumptions, Cluster
from mugrpo_megatron.plan.layout import Layout, layout_of, with_layout
from mugrpo_megatron.plan.memory import RECOMPUTE, Serving, memory
from mugrpo_megatron.plan.timing import update_seconds
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.checks import layout_problems
from mugrpo_megatron.recipe.layouts import candidates, distance
from mugrpo_megatron.weights.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout of the learner on the cluster."""

    layout: Layout
    seconds: float
    """Of one update."""
    learn: float
    """Bytes of the learner phase on its fullest rank."""
    problems: tuple[str, ...]
    """Why it is refused; empty where it is valid."""
    distance: float
    """From the recipe's own layout."""


def compare(
    recipe: Recipe,
    architecture: Architecture,
    config: Mapping,
    cluster: Cluster,
    guess: Assumptions,
    engine: Serving,
) -> list[Candidate]:
    """Valid layouts, fastest first, then the refused ones, nearest to the recipe's first.

    Of the recompute choices of a layout the fastest that fits is listed, or, where none fits, the smallest.
    """
    found = [
        _best(candidate, recipe, architecture, config, cluster, guess, engine)
        for candidate in _worth_trying(recipe, config, cluster)
    ]
    return sorted(found, key=lambda one: (bool(one.problems), one.distance if one.problems else one.seconds))


def _worth_trying(recipe: Recipe, config: Mapping, cluster: Cluster) -> Iterator[Recipe]:
    """The recipe in every candidate layout; context parallelism only up to twice of what it asks for."""
    for parallel in candidates(dict(config), cluster.world):
        if parallel.context <= 2 * recipe.parallel.context:
            yield recipe.model_copy(update={"parallel": parallel})


def _best(
    candidate: Recipe,
    recipe: Recipe,
    architecture: Architecture,
    config: Mapping,
    cluster: Cluster,
    guess: Assumptions,
    engine: Serving,
) -> Candidate:
    away = distance(candidate.parallel, recipe.parallel)
    layout = layout_of(candidate, cluster.world)
    problems = tuple(layout_problems(candidate, dict(config), cluster.world)) + tuple(_slow(layout, cluster))
    if problems:
        return Candidate(layout, float("inf"), 0.0, problems, away)
    choices = []
    for recompute in RECOMPUTE:
        learner = recipe.learner.model_copy(update={"recompute": recompute})
        trial = candidate.model_copy(update={"learner": learner})
        own = layout_of(trial, cluster.world)
        need = memory(trial, architecture, own, cluster, guess, engine)
        seconds = update_seconds(trial, architecture, own, cluster, guess)
        choices.append(Candidate(own, seconds, need.learn, tuple(need.problems), away))
    fitting = [one for one in choices if not one.problems]
    return min(fitting, key=lambda one: one.seconds) if fitting else min(choices, key=lambda one: one.learn)


def _slow(layout: Layout, cluster: Cluster) -> Iterator[str]:
    if layout.tensor > cluster.per_node:
        yield f"tensor {layout.tensor} would leave the node, which has {cluster.per_node} devices"


def nearest_fitting(found: list[Candidate]) -> Candidate | None:
    """The valid layout closest to the recipe's; the faster one of equals."""
    valid = [one for one in found if not one.problems]
    return min(valid, key=lambda one: (one.distance, one.seconds)) if valid else None


def recipe_keys(recipe: Recipe, candidate: Candidate) -> str:
    """The candidate as the keys that a recipe would have to set."""
    changed = with_layout(recipe, candidate.layout)
    keys = [
        f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for section in ("parallel", "learner")
        for key, value in getattr(changed, section).model_dump().items()
        if value != getattr(getattr(recipe, section), key)
    ]
    return " ".join(f"--set {key}" for key in keys)
