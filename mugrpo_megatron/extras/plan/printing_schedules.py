"""Prints the hours that the same updates take under other schedules.

With a pilot run, also by how many points each schedule may trail GRPO after equal updates and be level with it after
equal time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.comparison.equal_time import Curve, Estimate, over_updates
from mugrpo_megatron.extras.plan.plan import RunPlan
from mugrpo_megatron.extras.plan.schedules import GRPO_UPDATES, OFF, Speed, may_lose
from mugrpo_megatron.observe.progress import new_table
from mugrpo_megatron.observe.results import measure_in
from mugrpo_megatron.observe.rundata import read_run

MOST_OF_IT = 0.9
"""A schedule that saves at least this share of the hours that four stages save has saved most of them."""


@dataclass(frozen=True, slots=True)
class Pilot:
    """A run with GRPO's schedule, whose held-out curve says what further updates are worth."""

    path: Path
    curve: Curve
    """The run's held-out figures over its updates."""
    measure: str


def read_pilot(path: Path) -> Pilot:
    """Read the pilot in `path`; UserError if it is no run, has too few evaluations, or if its learning rate decays."""
    run = read_run(path)
    section = run.recipe.get("optimizer", {})
    if section.get("decay", "constant") != "constant":
        raise UserError(
            f"--pilot {path}: its learning rate decays ({section['decay']}), so the beginning of its curve is not that "
            'of a shorter run; name a run with optimizer.decay = "constant"'
        )
    try:
        curve = over_updates(run)
        may_lose(curve, 1.0)
    except ValueError as error:
        raise UserError(f"--pilot {path}: {error}; name a run that was evaluated several times") from None
    return Pilot(path, curve, measure_in(run.evals))


def print_schedules(plan: RunPlan, pilot: Pilot | None = None) -> None:
    """Print the hours of each schedule and what they consist of; with a pilot, also by how much each may trail GRPO
    after equal updates and still be level with it after equal time."""
    console = Console()
    console.print(f"{plan.cluster}, {plan.parameters / 1e9:.2f} B parameters, {plan.layout}", highlight=False)
    console.print(_hours(plan))
    if pilot:
        console.print(_losses(plan, pilot))
    console.print(
        "Hours and speed-up leave out evaluations, whose number is your choice. In brackets: the speed-up if each "
        f"assumed rate or length may be off by a factor of {OFF}, as measured ones were (docs/plan.md).",
        highlight=False,
    )


def _hours(plan: RunPlan) -> Table:
    updates = plan.schedules[0].stages * plan.schedules[0].updates_per_stage
    table = new_table(
        f"{updates:,} updates: hours, and speed-up over GRPO with µ = {min(GRPO_UPDATES, updates)}",
        *(">µ", ">hours", ">speed-up", ">saved", ">tails", ">switch", ">sync", ">evaluate"),
    )
    for speed in plan.speeds:
        schedule = speed.schedule
        bold = "bold" if schedule.updates_per_stage == plan.schedules[0].updates_per_stage else ""
        table.add_row(
            f"{schedule.updates_per_stage:,}",
            _of_hours(schedule.without_evaluations),
            f"{speed.speed_up:.2f} ({speed.low:.2f}–{speed.high:.2f})",
            "–" if math.isnan(speed.share) else f"{100 * speed.share:.0f} %",
            *(_of_hours(schedule.seconds.get(name, schedule.tail)) for name in ("tails", "switch", "sync", "evaluate")),
            style=bold,
        )
    table.caption = _knee(plan.speeds)
    return table


def _knee(speeds: Sequence[Speed]) -> str:
    """A sentence on the smallest µ that saves at least MOST_OF_IT of the hours that mu-GRPO's four stages save, or on
    that none does."""
    most = next((speed for speed in speeds if speed.share >= MOST_OF_IT), None)
    if most is None:
        return "No schedule takes less time than GRPO's."
    return (
        f"µ = {most.schedule.updates_per_stage:,} saves {100 * most.share:.0f} % of what four stages save. Bold: this "
        "recipe. tails: engines that wait for a stage's longest responses."
    )


def _losses(plan: RunPlan, pilot: Pilot) -> Table:
    unit, scale = ("points", 100) if pilot.measure == "accuracy" else ("reward", 1)
    table = new_table(
        f"May lose after equal updates and be level at equal time ({pilot.path.resolve().name})",
        *(">µ", ">speed-up", ">GRPO's updates", f">{unit}, 95 %", ">over the range"),
    )
    for speed in plan.speeds:
        middle, low, high = (_at(pilot, k) for k in (speed.speed_up, speed.low, speed.high))
        table.add_row(
            f"{speed.schedule.updates_per_stage:,}",
            f"{speed.speed_up:.2f}",
            f"{pilot.curve.end / speed.speed_up:,.0f}",
            _points(middle, scale),
            "–" if not (low and high) else f"{scale * low.value:+.1f} to {scale * high.value:+.1f}",
        )
    table.caption = (
        f"A(U) - A(U / speed-up) of the pilot's curve, U = {pilot.curve.end:,.0f}; A is a run's mean over its last "
        "quarter. The interval covers evaluation noise only: another seed's run differs by more."
    )
    return table


def _at(pilot: Pilot, speed_up: float) -> Estimate | None:
    """`may_lose` for a schedule of this speed-up; None if the pilot was not evaluated early enough, or if GRPO takes
    more updates in the schedule's time than the pilot has."""
    try:
        return may_lose(pilot.curve, speed_up)
    except ValueError:
        return None


def _points(estimate: Estimate | None, scale: float) -> str:
    if estimate is None:
        return "–"
    error = "" if math.isnan(estimate.error) else f" ± {scale * estimate.half:.1f}"
    return f"{scale * estimate.value:+.1f}{error}"


def _of_hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 0.05 else f"{hours:.2f}"


def pilot_as_dict(plan: RunPlan, pilot: Pilot) -> dict[str, Any]:
    """The pilot and, for each schedule, `may_lose` (accuracy as a share, or mean reward) as JSON values: at the
    speed-up, with its standard error, and at both ends of the speed-up's range."""
    rows = []
    for speed in plan.speeds:
        middle, low, high = (_at(pilot, k) for k in (speed.speed_up, speed.low, speed.high))
        rows.append(
            {
                "updates_per_stage": speed.schedule.updates_per_stage,
                "may_lose": middle and middle.value,
                "error": middle and middle.error,
                "at_low": low and low.value,
                "at_high": high and high.value,
            }
        )
    return {"run": str(pilot.path), "updates": pilot.curve.end, "measure": pilot.measure, "may_lose": rows}
