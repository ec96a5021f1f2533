"""Computes the data that report.js draws: axes, stage boundaries, charts and the time line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.metrics import PHASES
from mugrpo_megatron.observe.rundata import RunData
from mugrpo_megatron.report.charts import ChartData, charts
from mugrpo_megatron.report.curves import Chart, ages_of, axes_of, longest, reward_span
from mugrpo_megatron.report.details import NONE, Details
from mugrpo_megatron.report.heat import heat_map
from mugrpo_megatron.report.probes import AXIS, ages_of_probes, objective_of, probed_responses, trigger_axes
from mugrpo_megatron.report.triggers import thresholds_of

MAX_POINTS = 400
"""Most points of a curve: a panel is about as many pixels wide, and with more points the page would be larger."""
MAX_SPANS = 1000
"""Most phases that the time line draws one by one. If there are more, it draws the share of each of SLICES time slices
that each kind of phase took."""
SLICES = 500


@dataclass(frozen=True, slots=True)
class Drawing:
    """The data that report.js draws."""

    axes: dict[str, dict[str, list[float]]]
    """Axis name -> where its points are: `u` in updates (or in the unit of the chart's own horizontal axis), `t` in
    seconds."""
    boundaries: list[dict[str, float]]
    """The start of each stage: its number, and where it is in updates (`u`) and in seconds (`t`)."""
    end: dict[str, float]
    """Horizontal axis (`u` for updates, `t` for seconds, `age`, `length` or `reward`) -> where it ends."""
    begin: dict[str, float]
    """Horizontal axis -> where it starts, if not at 0."""
    charts: list[Chart]
    timeline: dict[str, Any]
    heat: dict[str, Any] | None = None
    bucket: int = 1
    """Number of updates that one point stands for."""
    not_finite: Mapping[str, int] = field(default_factory=dict)
    """Metric -> number of updates in which it was NaN or infinite."""


def draw(run: RunData, details: Details = NONE) -> Drawing:
    """Compute the drawing of a run; charts without a value are left out."""
    probed = probed_responses(details, run.recipe)
    bucket, buckets = buckets_of(run.updates)
    boundaries = _boundaries(run)
    begin = {boundary["stage"]: boundary for boundary in boundaries}
    stages = [row for row in run.stages if row["stage"] in begin]
    starts, firsts = [begin[row["stage"]] for row in stages], [rows[0] for rows in buckets]
    probe_ages = ages_of_probes(probed)
    places = {"age": ages_of(run.updates), AXIS: probe_ages, **axes_of(details.stages), **trigger_axes(probed)}
    first, last = reward_span(details.stages)
    return Drawing(
        axes={
            "update": axis_of([row["update"] for row in firsts], [run.clock(row["time"]) for row in firsts]),
            "eval": axis_of([row["update"] for row in run.evals], [run.clock(row["time"]) for row in run.evals]),
            "stage": axis_of([start["u"] for start in starts], [start["t"] for start in starts]),
            **{name: axis_of(points, []) for name, points in places.items()},
        },
        boundaries=boundaries,
        end={
            "u": run.updates[-1]["update"] + 1 if run.updates else 1,
            "t": run.seconds,
            "age": max([1, *(row["age"] for row in run.updates), *probe_ages]),
            "length": max([longest(details.stages), *(len(response.probe.tokens) + 1.0 for response in probed)]),
            "reward": last,
        },
        begin={"reward": first},
        charts=charts(ChartData(run, buckets, stages, details, probed, thresholds_of(run))),
        timeline=_timeline(run),
        heat=heat_map(probed, objective_of(run.recipe)),
        bucket=bucket,
        not_finite=dict(Counter(name for row in run.updates for name in row.get("not_finite", ()))),
    )


def buckets_of(updates: Sequence[Row]) -> tuple[int, list[Sequence[Row]]]:
    """Divide the updates among the points of a chart; returns the number of updates of a point, and the rows of each
    point.

    The number is the smallest with which there are at most MAX_POINTS points; the last point may have fewer updates.
    """
    size = math.ceil(len(updates) / MAX_POINTS) or 1
    return size, [updates[start : start + size] for start in range(0, len(updates), size)]


def axis_of(updates: Iterable[float], seconds: Iterable[float]) -> dict[str, list[float]]:
    """An axis as `Drawing.axes` has it: each point's place in updates, or in the axis's own unit, and in seconds (none
    for an axis with its own unit)."""
    return {"u": list(updates), "t": [round(value, 2) for value in seconds]}


def _boundaries(run: RunData) -> list[dict[str, float]]:
    """The start of each stage that has an update. Its time is the start of the stage's first phase, or the time of its
    first update if no phase of the stage was logged."""
    begins: dict[int, float] = {}
    for row in run.phases:
        begins[row["stage"]] = min(row["start"], begins.get(row["stage"], row["start"]))
    return [
        {"stage": stage, "u": row["update"], "t": run.clock(begins[stage] if stage in begins else row["time"])}
        for row in run.stage_starts()
        for stage in (row["stage"],)
    ]


def _timeline(run: RunData) -> dict[str, Any]:
    """The data of the time line: phases as spans [phase, stage, start, end] in seconds; if there are more than
    MAX_SPANS, the share of each of SLICES time slices that each phase took."""
    ran = {row["phase"] for row in run.phases}
    names = [name for name in PHASES if name in ran]
    spans = [(names.index(r["phase"]), r["stage"], run.clock(r["start"]), run.clock(r["end"])) for r in run.phases]
    if len(spans) <= MAX_SPANS:
        return {"phases": names, "spans": [[p, s, round(a, 3), round(b, 3)] for p, s, a, b in spans], "slices": []}
    width = run.seconds / SLICES
    slices = [[0.0] * SLICES for _ in names]
    for phase, _, start, end in spans:
        for index in range(int(start / width), min(int(end / width), SLICES - 1) + 1):
            slices[phase][index] += min(end, (index + 1) * width) - max(start, index * width)
    return {"phases": names, "spans": [], "slices": [[round(value / width, 3) for value in row] for row in slices]}
