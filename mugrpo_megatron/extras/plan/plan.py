"""The whole plan of a recipe on a cluster: `mugrpo plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mugrpo_megatron.checks.engines import check_engine_device
from mugrpo_megatron.checks.layouts import check_layout
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.case import Case, Layout, Model, find_model, make_case, parameters
from mugrpo_megatron.extras.plan.hardware import Assumptions, Cluster, assume, engines_of, make_cluster
from mugrpo_megatron.extras.plan.memory import Batch, Memory, batch_of, engine_memory, memory
from mugrpo_megatron.extras.plan.search import (
    Candidate,
    Split,
    best_split,
    compare,
    fitting_engine,
    hiding_split,
    nearest_fitting,
    recipe_keys,
)
from mugrpo_megatron.extras.plan.time import Phases, Schedule, bubble, checkpoint_bytes, phases, schedules, sync_bytes
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import ParallelSection

PLANNED = "plan such a number with --nodes and --gpus-per-node, or shrink the layout with --set"
"""The way out where the layout does not fit the ranks of the planned cluster."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `mugrpo plan` prints."""

    model: Model
    parameters: int
    cluster: Cluster
    assumptions: Assumptions
    layout: Layout
    batch: Batch
    memory: Memory
    phases: Phases
    """Of one stage, of mean length where `schedule.growth` makes them differ."""
    stage_lengths: tuple[int, int]
    """Updates that the first and the last stage sample responses for."""
    engines: int
    bubble: float
    checkpoint_bytes: float
    sync_bytes: int
    """To each engine, in every stage."""
    schedules: list[Schedule]
    layouts: list[Candidate]
    prefetch: Split | None
    """With `schedule.max_sample_age` on the same devices, divided at best."""
    prefetch_hidden: Split | None
    """With further nodes for the engines, so many that the learner never waits."""

    def gpu_hours(self, seconds: float) -> float:
        """Hours of all devices together."""
        return self.cluster.world * seconds / 3600


def make_plan(
    recipe: Recipe,
    nodes: int,
    per_node: int,
    device: str,
    model_config: Path | None = None,
    assumptions: Iterable[str] = (),
) -> Plan:
    """The plan of `recipe` on a cluster.

    Raises UserError when the device cannot do what the recipe asks, and, naming the nearest layout that works, when the
    layout cannot run or a phase does not fit.
    """
    cluster, assumed = make_cluster(nodes, per_node, device), assume(assumptions)
    check_engine_device(recipe, cluster.device.cuda)
    model = find_model(recipe, model_config)
    check_layout(recipe, model.config, cluster.world, PLANNED, partial(_options, recipe))
    engines = engines_of(recipe, cluster)
    case = make_case(recipe, model.architecture, model.config, cluster, assumed)
    engine = engine_memory(case)
    need, layouts = memory(case, engine), compare(case, engine)
    if not need.fits:
        raise UserError(_refusal(case, need, layouts))
    batch = batch_of(case)
    return Plan(
        model=model,
        parameters=parameters(model.architecture),
        cluster=cluster,
        assumptions=assumed,
        layout=case.layout,
        batch=batch,
        memory=need,
        phases=phases(case, need),
        stage_lengths=(recipe.schedule.length(0), recipe.schedule.length(recipe.schedule.stages - 1)),
        engines=engines,
        bubble=bubble(case.layout, batch.micro_batches),
        checkpoint_bytes=checkpoint_bytes(case),
        sync_bytes=sync_bytes(case),
        schedules=schedules(case, need),
        layouts=layouts,
        prefetch=best_split(case),
        prefetch_hidden=hiding_split(case),
    )


def plan_as_dict(plan: Plan, launch: Mapping[str, str]) -> dict[str, Any]:
    """The plan as JSON values: bytes, seconds, shares; and the commands that start the run."""
    return {
        "cluster": asdict(plan.cluster),
        "model": {"source": plan.model.source, "parameters": plan.parameters, "config": plan.model.config},
        "assumptions": asdict(plan.assumptions),
        "layout": asdict(plan.layout),
        "batch": asdict(plan.batch),
        "memory": asdict(plan.memory),
        "stage_seconds": asdict(plan.phases),
        "stage_lengths": list(plan.stage_lengths),
        "engines": plan.engines,
        "bubble": plan.bubble,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "sync_bytes": plan.sync_bytes,
        "schedules": [
            {**asdict(one), "total": one.total, "gpu_hours": plan.gpu_hours(one.total)} for one in plan.schedules
        ],
        "prefetch": _split_as_dict(plan.prefetch),
        "prefetch_hidden": _split_as_dict(plan.prefetch_hidden),
        "layouts": [
            {
                "layout": asdict(one.layout),
                "seconds": one.seconds if not one.problems else None,
                "learn": one.learn,
                "problems": one.problems,
                "distance": one.distance,
            }
            for one in plan.layouts
        ],
        "launch": dict(launch),
    }  # fmt: skip


def _split_as_dict(split: Split | None) -> dict[str, Any] | None:
    return asdict(split) | {"total": split.seconds, "gpu_hours": split.device_seconds / 3600} if split else None


def _options(recipe: Recipe, layout: ParallelSection) -> str:
    """The layout as options of `mugrpo plan`."""
    return recipe_keys(recipe, recipe.model_copy(update={"parallel": layout}))


def _refusal(case: Case, need: Memory, layouts: list[Candidate]) -> str:
    where = f"{case.cluster.nodes} x {case.cluster.per_node} {case.cluster.device.name}"
    sentence = f"{case.layout} on {where} does not fit: {'; '.join(need.problems)}"
    nearest = nearest_fitting(layouts)
    if nearest is None and (tensor := fitting_engine(case)):
        return f"{sentence}; it fits with engines of {tensor} devices: --set engine.tensor={tensor}"
    if nearest is None:
        return f"{sentence}; no layout fits on so few devices: use more devices, or lower learner.micro_batch_tokens"
    return f"{sentence}; the nearest layout that fits is {nearest.layout}: {recipe_keys(case.recipe, nearest.recipe)}"
