"""A whole plan: `mugrpo plan`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.plan.cluster import Assumptions, Cluster, assume, engines_of, make_cluster
from mugrpo_megatron.plan.layout import Layout, layout_of, parameters
from mugrpo_megatron.plan.memory import ITEMSIZE, Batch, Memory, batch_of, memory, serving
from mugrpo_megatron.plan.models import Model, find_model
from mugrpo_megatron.plan.schedule import Schedule, schedules
from mugrpo_megatron.plan.search import Candidate, compare, nearest_fitting, recipe_keys
from mugrpo_megatron.plan.timing import Phases, bubble, checkpoint_bytes, phases
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.checks import check_layout


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `mugrpo plan` says."""

    model: Model
    parameters: int
    cluster: Cluster
    assumptions: Assumptions
    layout: Layout
    batch: Batch
    memory: Memory
    phases: Phases
    """Of one stage."""
    engines: int
    bubble: float
    checkpoint_bytes: float
    sync_bytes: int
    """To each engine, in every stage."""
    schedules: list[Schedule]
    layouts: list[Candidate]


def make_plan(
    recipe: Recipe,
    nodes: int,
    per_node: int,
    device: str,
    model_config: Path | None = None,
    assumptions: Iterable[str] = (),
) -> Plan:
    """The plan of `recipe` on a cluster.

    Raises UserError, naming the nearest layout that works, when the layout cannot be or a phase does not fit.
    """
    cluster, guess = make_cluster(nodes, per_node, device), assume(assumptions)
    model = find_model(recipe, model_config)
    check_layout(recipe, model.config, cluster.world)
    engines = engines_of(recipe, cluster)
    layout = layout_of(recipe, cluster.world)
    about = recipe, model.architecture, model.config
    engine = serving(*about, cluster, guess)
    need = memory(recipe, model.architecture, layout, cluster, guess, engine)
    layouts = compare(*about, cluster, guess, engine)
    if not need.fits:
        raise UserError(_refusal(recipe, layout, need, layouts, cluster))
    batch = batch_of(recipe, layout, guess)
    return Plan(
        model=model,
        parameters=parameters(model.architecture),
        cluster=cluster,
        assumptions=guess,
        layout=layout,
        batch=batch,
        memory=need,
        phases=phases(*about, layout, cluster, guess, need),
        engines=engines,
        bubble=bubble(layout, batch.micro_batches),
        checkpoint_bytes=checkpoint_bytes(recipe, model.architecture),
        sync_bytes=parameters(model.architecture) * ITEMSIZE[recipe.model.dtype],
        schedules=schedules(*about, layout, cluster, guess, need),
        layouts=layouts,
    )


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values: bytes, seconds, shares."""
    return {
        "model": {"source": plan.model.source, "parameters": plan.parameters, "config": plan.model.config},
        "cluster": asdict(plan.cluster),
        "assumptions": asdict(plan.assumptions),
        "layout": asdict(plan.layout),
        "batch": asdict(plan.batch),
        "memory": asdict(plan.memory),
        "stage_seconds": asdict(plan.phases),
        "engines": plan.engines,
        "bubble": plan.bubble,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "sync_bytes": plan.sync_bytes,
        "schedules": [{**asdict(one), "total": one.total} for one in plan.schedules],
        "layouts": [
            {**asdict(one), "seconds": one.seconds if not one.problems else None}
            for one in plan.layouts
        ],
    }  # fmt: skip


def _refusal(recipe: Recipe, layout: Layout, need: Memory, layouts: list[Candidate], cluster: Cluster) -> str:
    where = f"{cluster.nodes} x {cluster.per_node} {cluster.device.name}"
    said = f"{layout} on {where} does not fit: {'; '.join(need.problems)}"
    found = nearest_fitting(layouts)
    if found is None:
        return f"{said}; no layout fits on so few devices: take more, or a smaller learner.micro_batch_tokens"
    return f"{said}; the nearest layout that fits is {found.layout}: {recipe_keys(recipe, found)}"
