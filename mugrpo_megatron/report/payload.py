"""The data that report.js draws: axes, stage boundaries, charts and the time line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mugrpo_megatron.observe.log import Row
from mugrpo_megatron.observe.metrics import PHASES
from mugrpo_megatron.report.atlas import AXIS, atlas_ages, trigger_axes
from mugrpo_megatron.report.charts import charts
from mugrpo_megatron.report.curves import Chart, ages_of, sampled_early, staleness
from mugrpo_megatron.report.details import NONE, Details
from mugrpo_megatron.report.heat import heat_map
from mugrpo_megatron.report.probes import followed, objective_of
from mugrpo_megatron.report.response_charts import length_end, response_axes, reward_span
from mugrpo_megatron.report.rundata import RunData

MAX_POINTS = 400
"""With more updates than this, a point stands for several: about as many as a panel has pixels, in a page of 400 kB."""
MAX_SPANS = 1000
"""With more phases than this, the time line shows shares of time slices."""
SLICES = 500


@dataclass(frozen=True, slots=True)
class Drawing:
    """The data that report.js draws."""

    axes: dict[str, dict[str, list[float]]]
    """Axis name -> positions of its points: `u` in updates (or what the chart is along), `t` in seconds."""
    boundaries: list[dict[str, float]]
    """Where each stage starts: stage, u, t."""
    end: dict[str, float]
    """Where each abscissa ends: u, t, age, length, reward."""
    begin: dict[str, float]
    """Where each one begins that does not begin at 0."""
    charts: list[Chart]
    timeline: dict[str, Any]
    heat: dict[str, Any] | None = None
    bucket: int = 1
    """Updates that one point stands for."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Metric -> updates in which it was NaN or infinite."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def draw(run: RunData, details: Details = NONE) -> Drawing:
    """The drawing of a run, without charts that have no value."""
    probed = followed(details, run.recipe, sampled_early(run.updates))
    bucket, buckets = buckets_of(run.updates, MAX_POINTS)
    boundaries = _boundaries(run)
    begin = {boundary["stage"]: boundary for boundary in boundaries}
    stages = [row for row in run.stages if row["stage"] in begin]
    axes = {
        "update": axis_of([rows[0]["update"] for rows in buckets], [run.clock(rows[0]["time"]) for rows in buckets]),
        "eval": axis_of([row["update"] for row in run.evals], [run.clock(row["time"]) for row in run.evals]),
        "stage": axis_of([begin[row["stage"]]["u"] for row in stages], [begin[row["stage"]]["t"] for row in stages]),
        "age": axis_of(ages_of(run.updates), []),
        AXIS: axis_of(atlas_ages(probed), []),
    }
    own = response_axes(details.stages) | trigger_axes(probed)
    first, last = reward_span(details.stages) if details.stages else (0.0, 1.0)
    longest = max([length_end(details.stages), *(len(one.response.tokens) + 1.0 for one in probed)], default=1.0)
    return Drawing(
        axes=axes | {name: axis_of(places, []) for name, places in own.items()},
        boundaries=boundaries,
        end={
            "u": run.updates[-1]["update"] + 1 if run.updates else 1,
            "t": run.seconds,
            "age": max([1, *(staleness(row) for row in run.updates), *axes[AXIS]["u"]]),
            "length": longest,
            "reward": last,
        },
        begin={"reward": first},
        charts=charts(run, buckets, stages, details, probed),
        timeline=_timeline(run),
        heat=heat_map(probed, objective_of(run.recipe)),
        bucket=bucket,
        not_finite=_count_not_finite(run.updates),
    )


def buckets_of(updates: Sequence[Row], most: int) -> tuple[int, list[Sequence[Row]]]:
    """How many updates a point stands for so that there are at most `most` points, and the updates of each."""
    size = math.ceil(len(updates) / most) or 1
    return size, [updates[start : start + size] for start in range(0, len(updates), size)]


def axis_of(updates: Iterable[float], seconds: Iterable[float]) -> dict[str, list[float]]:
    """The positions of an axis's points in updates (or age) and in seconds."""
    return {"u": list(updates), "t": [round(value, 2) for value in seconds]}


def _boundaries(run: RunData) -> list[dict[str, float]]:
    """Where each stage with an update begins; its time is that of its first phase, the sync."""
    first_phase: dict[int, float] = {}
    for row in run.phases:
        first_phase[row["stage"]] = min(row["start"], first_phase.get(row["stage"], row["start"]))
    return [
        {
            "stage": stage,
            "u": row["update"],
            "t": run.clock(first_phase[stage] if stage in first_phase else row["time"]),
        }
        for row in run.stage_starts()
        for stage in (row["stage"],)
    ]


def _timeline(run: RunData) -> dict[str, Any]:
    """Phases as spans [phase, stage, start, end]; if there are too many, as shares of equal time slices."""
    ran = {row["phase"] for row in run.phases}
    names = [name for name in PHASES if name in ran]
    spans = [(names.index(r["phase"]), r["stage"], run.clock(r["start"]), run.clock(r["end"])) for r in run.phases]
    if len(spans) <= MAX_SPANS:
        return {"phases": names, "spans": [[p, s, round(a, 3), round(b, 3)] for p, s, a, b in spans], "slices": []}
    width = run.seconds / SLICES
    slices = [[0.0] * SLICES for _ in names]
    for phase, _, start, end in spans:
        for place in range(int(start / width), min(int(end / width), SLICES - 1) + 1):
            slices[phase][place] += min(end, (place + 1) * width) - max(start, place * width)
    return {"phases": names, "spans": [], "slices": [[round(value / width, 3) for value in row] for row in slices]}


def _count_not_finite(updates: Iterable[Row]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in updates:
        for name in row.get("not_finite", ()):
            counts[name] = counts.get(name, 0) + 1
    return counts
