"""The whole plan of a recipe on a cluster: `mugrpo plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mugrpo_megatron.checks.engines import EngineSetup, check_engine_device
from mugrpo_megatron.checks.layouts import layout_problems, problems_of_any_layout
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.auxiliary import AuxiliaryCost, auxiliary_costs, auxiliary_problems
from mugrpo_megatron.extras.plan.case import Layout, ModelShape, PlanCase, find_model, make_case, parameters
from mugrpo_megatron.extras.plan.hardware import Assumptions, Cluster, assume, engines_of, make_cluster
from mugrpo_megatron.extras.plan.memory import Memory, PackedRows, batch_of, conversion_bytes, engine_memory, memory
from mugrpo_megatron.extras.plan.schedules import Schedule, Speed, schedules, speeds
from mugrpo_megatron.extras.plan.search import (
    Candidate,
    Roomier,
    compare_layouts,
    fastest_fit,
    fewest_devices,
    fit_with_adapters,
    is_tight,
    recipe_keys,
    roomier,
)
from mugrpo_megatron.extras.plan.time import Phases, bubble, checkpoint_bytes, phases, sync_bytes
from mugrpo_megatron.pages import page_address
from mugrpo_megatron.recipe import Recipe

PLANNED = "plan such a number with --nodes and --gpus-per-node, or shrink the layout with --set"
"""The way out if the layout does not fit the ranks of the planned cluster."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything that `mugrpo plan` prints."""

    model: ModelShape
    parameters: int
    cluster: Cluster
    assumptions: Assumptions
    layout: Layout
    batch: PackedRows
    memory: Memory
    phases: Phases
    """Seconds of one stage; of mean length if `schedule.growth` makes stages differ."""
    stage_lengths: tuple[int, int]
    """Updates that the first and the last stage sample responses for."""
    engines: int
    auxiliaries: list[AuxiliaryCost]
    bubble: float
    """Share of an update for which a pipeline stage idles."""
    checkpoint_bytes: float
    sync_bytes: int
    """Bytes sent to each engine in every stage."""
    conversion_bytes: float
    """Peak bytes of host memory of `mugrpo convert`."""
    schedules: list[Schedule]
    speeds: list[Speed]
    """Schedules of µ = 1, 2, 4, ... beside GRPO's; empty unless asked for."""
    layouts: list[Candidate]
    roomier: Roomier | None
    """What to change if the plan is tight; None if it is not, or nothing helps."""

    @property
    def tight(self) -> bool:
        """Whether the plan's memory `is_tight`."""
        return is_tight(self.memory)

    def gpu_hours(self, seconds: float) -> float:
        """Device-hours of the whole cluster over `seconds` seconds."""
        return self.cluster.world * seconds / 3600


def make_plan(
    recipe: Recipe,
    nodes: int,
    per_node: int,
    device: str,
    model_config: Path | None = None,
    assumptions: Iterable[str] = (),
    compare_schedules: bool = False,
) -> RunPlan:
    """Plan `recipe` on a cluster; with `compare_schedules` also its updates at other µ, which takes seconds.

    Raises UserError when the device cannot do what the recipe asks, and when the layout or the engines cannot run or a
    phase does not fit. In the second case the error names settings that work, if it finds some.
    """
    cluster, assumed = make_cluster(nodes, per_node, device), assume(assumptions)
    check_engine_device(EngineSetup(recipe, cuda=cluster.device.cuda))
    model = find_model(recipe.model, model_config)
    case = make_case(recipe, model.architecture, model.config, cluster, assumed)
    if problems := _problems(case):
        raise UserError("; ".join([*problems, *_advice(case)]))
    engine = engine_memory(case)
    need, batch, auxiliaries = memory(case, engine), batch_of(case), auxiliary_costs(case)
    if problems := auxiliary_problems(auxiliaries, need.resting, need.device):
        raise UserError("; ".join(problems))
    return RunPlan(
        model=model,
        parameters=parameters(model.architecture),
        cluster=cluster,
        assumptions=assumed,
        layout=case.layout,
        batch=batch,
        memory=need,
        phases=phases(case, need),
        stage_lengths=(recipe.schedule.length(0), recipe.schedule.length(recipe.schedule.stages - 1)),
        engines=engines_of(recipe.engine, cluster),
        auxiliaries=auxiliaries,
        bubble=bubble(case.layout, batch.micro_batches),
        checkpoint_bytes=checkpoint_bytes(case),
        sync_bytes=sync_bytes(case),
        conversion_bytes=conversion_bytes(case.architecture, case.itemsize),
        schedules=schedules(case, need),
        speeds=speeds(case, need) if compare_schedules else [],
        layouts=compare_layouts(case, engine),
        roomier=roomier(case) if is_tight(need) else None,
    )


def plan_as_dict(plan: RunPlan, launch: Mapping[str, str]) -> dict[str, Any]:
    """The plan as JSON values: bytes, seconds, shares; and the commands that start the run."""
    return {
        "fits": plan.memory.fits,
        "tight": plan.tight,
        "roomier": plan.roomier._asdict() if plan.roomier else None,
        "cluster": asdict(plan.cluster),
        "model": {"source": plan.model.source, "parameters": plan.parameters, "config": plan.model.config},
        "assumptions": asdict(plan.assumptions),
        "layout": asdict(plan.layout),
        "batch": asdict(plan.batch),
        "memory": asdict(plan.memory),
        "stage_seconds": asdict(plan.phases),
        "stage_lengths": list(plan.stage_lengths),
        "engines": plan.engines,
        "auxiliary": [asdict(cost) for cost in plan.auxiliaries],
        "bubble": plan.bubble,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "sync_bytes": plan.sync_bytes,
        "conversion_bytes": plan.conversion_bytes,
        "schedules": [
            {**asdict(schedule), "total": schedule.total, "gpu_hours": plan.gpu_hours(schedule.total)}
            for schedule in plan.schedules
        ],
        "speeds": [
            {**asdict(speed), "hours": speed.schedule.without_evaluations / 3600} for speed in plan.speeds
        ],
        "layouts": [
            {
                "layout": asdict(candidate.layout),
                "seconds": candidate.seconds if not candidate.problems else None,
                "learn": candidate.learn,
                "problems": candidate.problems,
                "distance": candidate.distance,
            }
            for candidate in plan.layouts
        ],
        "launch": dict(launch),
    }  # fmt: skip


def _problems(case: PlanCase) -> list[str]:
    """Sentences on why the recipe cannot run on the cluster; empty if it can."""
    recipe, config = case.recipe, dict(case.config)
    wrong = [
        *layout_problems(recipe.parallel, recipe.rollout, config, case.cluster.world, PLANNED),
        *problems_of_any_layout(recipe, config),
    ]
    if wrong:
        return wrong
    try:
        need = memory(case, engine_memory(case))
    except UserError as error:  # the ranks or nodes cannot be divided into engines
        return [str(error)]
    return [f"{case.layout} on {case.cluster} does not fit: {'; '.join(need.problems)}"] if not need.fits else []


def _advice(case: PlanCase) -> list[str]:
    """A sentence that names a layout and engine settings which fit the cluster, or says that none do and what else
    helps; empty if the recipe has a problem that no layout solves."""
    if any(problems_of_any_layout(case.with_keys("engine", tensor=1, nodes=1).recipe, dict(case.config))):
        return []
    if fit := fastest_fit(case):
        return [f"what fits is {_settings(case, fit)}"]
    ways = []
    if fit := fit_with_adapters(case):
        ways.append(f"train adapters ({page_address('lora')}), which fit as {_settings(case, fit)}")
    if fit := fewest_devices(case):
        where = f"--nodes {fit.cluster.nodes} --gpus-per-node {fit.cluster.per_node}"
        ways.append(f"use more devices: {fit.cluster.world} fit ({where}) as {_settings(case, fit)}")
    return [
        f"no layout, recomputation, engine.tensor or engine.memory_fraction fits {case.cluster}: "
        + "; or ".join([*ways, "take a smaller model"])
    ]


def _settings(case: PlanCase, fit: PlanCase) -> str:
    """The layout and the engines of `fit`, and the `--set` options that turn the planned recipe into it."""
    tensor = fit.recipe.engine.tensor
    engines = f"engines of {tensor} devices" if tensor > 1 else "an engine on each device"
    keys = recipe_keys(case.recipe, fit.recipe)
    return f"{fit.layout} with {engines}: {keys or 'the same settings'}"
