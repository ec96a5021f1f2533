"""The same updates under other schedules: hours, speed-up over GRPO, and by how much a schedule may trail GRPO after
equal updates and still be level with it after equal time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile

from mugrpo_megatron.extras.comparison.equal_time import Curve, Estimate, difference
from mugrpo_megatron.extras.plan.case import PlanCase
from mugrpo_megatron.extras.plan.decoding import decoding_seconds
from mugrpo_megatron.extras.plan.hardware import MOST, Assumptions
from mugrpo_megatron.extras.plan.memory import Memory
from mugrpo_megatron.extras.plan.time import phases, stage_bytes
from mugrpo_megatron.recipe.objective import ObjectiveSection
from mugrpo_megatron.recipe.scoring import EvalSection
from mugrpo_megatron.recipe.sections import ScheduleSection

GRPO_UPDATES = 4
"""The µ (updates of a stage) of GRPO in the paper."""
MU_GRPO_STAGES = 4
"""Number of stages of mu-GRPO in the paper."""
OFF = 1.7
"""Factor by which an assumed rate may be wrong: on one H200 measured passes and decoding steps were that much faster
than assumed (docs/plan.md)."""
UNCERTAIN: tuple[tuple[str, ...], ...] = (
    ("mfu", "mfu_experts"),
    ("decode", "-step_floor"),
    ("host_link", "bridge", "-wake"),
    ("mean_response",),
    ("spread",),
)
"""Assumptions on which a speed-up depends. Those of one group are scaled together; a `-` marks one that is in seconds,
which is scaled by the inverse."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The cost of the whole run under one schedule."""

    name: str
    stages: int
    updates_per_stage: int
    epochs: int
    seconds: Mapping[str, float]
    """Phase -> seconds of the whole run."""
    tail: float
    """Seconds of `generate` that one single stage would save: each stage waits for its longest responses."""
    stage_bytes: float
    rates: float
    """Sum of a stage's learning rates, before warm-up and decay: about how far Adam can move a weight in a stage."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def without_evaluations(self) -> float:
        return self.total - self.seconds["evaluate"]


@dataclass(frozen=True, slots=True)
class Speed:
    """How much less time a schedule takes than GRPO's."""

    schedule: Schedule
    speed_up: float
    """k: GRPO's seconds divided by the schedule's, for the same updates and without evaluations."""
    low: float
    high: float
    """Ends of the speed-up's range, `low` and `high`. Each group of `UNCERTAIN` alone moves the logarithm of the
    speed-up. The moves in one direction are combined as the root of the sum of their squares."""
    share: float
    """Seconds that the schedule saves over GRPO's, as a share of those that mu-GRPO's schedule saves; nan if mu-GRPO's
    saves none."""


def schedules(case: PlanCase, need: Memory) -> list[Schedule]:
    """The costs of the recipe's, GRPO's and mu-GRPO's schedules for the same updates, evaluated after the same
    updates."""
    schedule = case.recipe.schedule
    updates = schedule.stages * schedule.updates_per_stage
    options = {
        "this recipe": schedule.updates_per_stage,
        "GRPO's": min(GRPO_UPDATES, updates),
        "mu-GRPO's": -(-updates // MU_GRPO_STAGES),
    }
    return [schedule_of(case, need, updates, per_stage, name) for name, per_stage in options.items()]


def speeds(case: PlanCase, need: Memory) -> list[Speed]:
    """The costs of the recipe's updates with each µ, by rising µ, and their speed-up over GRPO with µ = 4.

    µ is the recipe's own and every power of 2 up to the number of updates, which is the same for all.
    """
    schedule = case.recipe.schedule
    updates = schedule.stages * schedule.updates_per_stage
    sizes = {schedule.updates_per_stage, *takewhile(lambda size: size <= updates, (2**n for n in range(63)))}
    found = {size: schedule_of(case, need, updates, size) for size in sorted(sizes)}
    baseline, most = grpo_seconds(case, need), _without_evaluations(case, need, updates, -(-updates // MU_GRPO_STAGES))
    deviations: dict[int, list[float]] = {size: [] for size in found}
    for assumptions in _wrong(case.assumptions):
        other = replace(case, assumptions=assumptions)
        changed = grpo_seconds(other, need)
        for size, cost in found.items():
            ratio = changed / _without_evaluations(other, need, updates, size)
            deviations[size].append(math.log(ratio / baseline * cost.without_evaluations))
    return [
        Speed(
            schedule=cost,
            speed_up=baseline / cost.without_evaluations,
            low=baseline / cost.without_evaluations * math.exp(-_norm(-d for d in deviations[size] if d < 0)),
            high=baseline / cost.without_evaluations * math.exp(_norm(d for d in deviations[size] if d > 0)),
            share=(baseline - cost.without_evaluations) / (baseline - most) if baseline > most else math.nan,
        )
        for size, cost in found.items()
    ]


def may_lose(pilot: Curve, speed_up: float) -> Estimate:
    """By how much a schedule may trail GRPO after equal updates and still be level with GRPO after equal time.

    This is A(U) - A(U / k) of the pilot's curve, which is GRPO's at a constant learning rate. U is its last update, k
    the schedule's speed-up, and A(n) what a run of n updates reaches (`reached`). Raises ValueError when the curve does
    not cover U / k.
    """
    return difference(pilot, pilot.end, pilot, pilot.end / speed_up)


def schedule_of(case: PlanCase, need: Memory, updates: int, per_stage: int, name: str = "") -> Schedule:
    """The cost of `updates` updates in stages of `per_stage`, with as many evaluations as in the recipe's schedule.

    A last stage with fewer updates costs less in proportion.
    """
    other = _in_stages(case, updates, per_stage)
    seconds = _seconds(other, need, updates)
    in_one_stage = decoding_seconds(updates * case.responses, case, need.serving)
    schedule = other.recipe.schedule
    return Schedule(
        name=name,
        stages=schedule.stages,
        updates_per_stage=per_stage,
        epochs=schedule.epochs,
        seconds=seconds,
        tail=max(0.0, seconds["generate"] - in_one_stage),
        stage_bytes=stage_bytes(other),
        rates=case.recipe.optimizer.lr * per_stage * schedule.epochs,
    )


def _in_stages(case: PlanCase, updates: int, per_stage: int) -> PlanCase:
    """The case with a schedule of `updates` updates in stages of `per_stage`."""
    recipe = case.recipe
    schedule = recipe.schedule.model_copy(
        update={"stages": -(-updates // per_stage), "updates_per_stage": per_stage, "growth": 1.0}
    )
    spaced = evaluated_every(updates_between(recipe.schedule, recipe.eval), recipe.eval, schedule)
    return case.with_recipe(recipe.model_copy(update={"schedule": schedule, "eval": spaced}))


def _seconds(case: PlanCase, need: Memory, updates: int) -> dict[str, float]:
    """Phase -> seconds of `updates` updates under the case's schedule."""
    stages = updates / case.recipe.schedule.updates_per_stage
    return {phase: stages * value for phase, value in asdict(phases(case, need)).items()}


def _without_evaluations(case: PlanCase, need: Memory, updates: int, per_stage: int) -> float:
    seconds = _seconds(_in_stages(case, updates, per_stage), need, updates)
    return sum(seconds.values()) - seconds["evaluate"]


def updates_between(schedule: ScheduleSection, section: EvalSection) -> float:
    """Optimizer updates between two evaluations; infinite if a run is evaluated only at its start and its end."""
    of_stages = section.every_stages * schedule.updates_on_stage or math.inf
    return min(of_stages, section.every_updates or math.inf)


def evaluated_every(updates: float, section: EvalSection, schedule: ScheduleSection) -> EvalSection:
    """An `[eval]` section that evaluates every `updates` updates, where possible at the start of stages."""
    if math.isinf(updates):
        return section.model_copy(update={"every_stages": 0, "every_updates": 0})
    stages = updates / schedule.updates_on_stage
    if stages >= 1:
        return section.model_copy(update={"every_stages": round(stages), "every_updates": 0})
    return section.model_copy(update={"every_stages": 1, "every_updates": round(updates)})


KEPT = ("kl_ref", "kl_coef", "kl_penalty", "teacher", "teacher_coef", "teacher_policy")
"""Keys of a recipe's objective that are kept in the GRPO with which it is compared."""


def grpo_seconds(case: PlanCase, need: Memory) -> float:
    """Seconds of the recipe's updates under GRPO with µ = 4, without evaluations.

    The objective is GRPO's too, so there is no pass that only stale responses need, such as one for a proximal policy.
    """
    kept = {key: getattr(case.recipe.objective, key) for key in KEPT}
    objective = ObjectiveSection.model_validate({"name": "grpo", **kept})
    grpo = case.with_recipe(case.recipe.model_copy(update={"objective": objective}))
    updates = grpo.recipe.schedule.stages * grpo.recipe.schedule.updates_per_stage
    return _without_evaluations(grpo, need, updates, min(GRPO_UPDATES, updates))


def _wrong(assumptions: Assumptions) -> Iterable[Assumptions]:
    """Yield the assumptions with the groups of `UNCERTAIN`, one after the other, multiplied and divided by `OFF`."""
    for group in UNCERTAIN:
        for factor in (OFF, 1 / OFF):
            yield replace(assumptions, **_scaled(assumptions, group, factor))


def _scaled(assumptions: Assumptions, group: Sequence[str], factor: float) -> dict[str, float]:
    changed = {}
    for name in group:
        field = name.removeprefix("-")
        value = getattr(assumptions, field) * (1 / factor if name != field else factor)
        changed[field] = min(value, MOST.get(field, math.inf))
    return changed


def _norm(deviations: Iterable[float]) -> float:
    return math.hypot(*deviations)
