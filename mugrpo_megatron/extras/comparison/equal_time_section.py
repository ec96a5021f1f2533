"""A comparison's section about equal time: what each run had reached after the time of the shortest one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mugrpo_megatron.extras.comparison.equal_time import (
    QUARTER,
    Curve,
    Estimate,
    difference,
    over_seconds,
    over_updates,
    reached,
)
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.results import format_value, measure_in, sets_in
from mugrpo_megatron.observe.rundata import RunData
from mugrpo_megatron.report.curves import Chart, Series
from mugrpo_megatron.report.drawing import axis_of
from mugrpo_megatron.report.page import PageSection

TITLE = "Equal time"


@dataclass(frozen=True, slots=True)
class Ends:
    """The runs' held-out curves over seconds and over updates, and the seconds and updates that every run has reached.

    The other runs are compared with the first one.
    """

    seconds: Sequence[Curve]
    updates: Sequence[Curve]
    until: float
    """Seconds that every run has spent, evaluations and saves left out."""
    after: float
    """Updates that every run has taken."""
    measure: str


def evaluated_on(run: RunData) -> tuple[tuple[str, int], ...]:
    """The name and the number of problems of each held-out set of the run's last evaluation."""
    return tuple((name, int(row[f"problems/{name}"])) for row in run.evals[-1:] for name in sets_in([row]))


def ends_of(runs: Sequence[RunData]) -> Ends | None:
    """What is needed to compare the runs at equal time, or None if they cannot be compared.

    They cannot if one has no evaluation, if their measures or held-out sets differ, or if one has no evaluation before
    the last quarter of the time that every run has spent, or of the updates that every run has taken.
    """
    if len({measure_in(run.evals) for run in runs}) > 1 or len({evaluated_on(run) for run in runs}) > 1:
        return None
    try:
        seconds, updates = [over_seconds(run) for run in runs], [over_updates(run) for run in runs]
        ends = Ends(
            seconds,
            updates,
            min(curve.end for curve in seconds),
            min(curve.end for curve in updates),
            measure_in(runs[0].evals),
        )
        for curve in seconds:
            reached(curve, ends.until)
        for curve in updates:
            reached(curve, ends.after)
    except ValueError:  # no evaluation, or none before the last quarter
        return None
    return ends


def section(ends: Ends, labels: Sequence[str], colors: Sequence[str]) -> PageSection:
    """The section: a sentence, a chart of the differences over time, and a table of what each run reached after equal
    time, with its differences from the first run at equal time and at equal updates."""
    return PageSection(TITLE, [_chart(ends, labels, colors)], _sentence(ends, labels), table=_table(ends, labels))


def axes(ends: Ends) -> dict[str, Any]:
    """The axes of each run's series in the chart: its seconds, and the updates that it had taken by then."""
    named = {}
    for number, curve in enumerate(ends.seconds[1:], start=1):
        at = _common(ends, curve)
        updates = np.interp(at, curve.spent, ends.updates[number].spent)
        named[f"equal{number}"] = axis_of(updates.tolist(), at) | {"starts": []}
    return named


def _common(ends: Ends, curve: Curve) -> list[float]:
    """The times, in seconds, of the evaluations at which a run can be compared with the first run.

    An evaluation at time t counts if both runs had an evaluation before 3/4 t, and the first run has one at t or later.
    """
    begin = max(curve.spent[0], ends.seconds[0].spent[0]) / QUARTER
    return [at for at in curve.spent.tolist() if max(begin, 1e-9) < at <= ends.seconds[0].end]


def _chart(ends: Ends, labels: Sequence[str], colors: Sequence[str]) -> Chart:
    scale = 100.0 if ends.measure == "accuracy" else 1.0
    series = []
    for number, curve in enumerate(ends.seconds[1:], start=1):
        gaps = [difference(curve, at, ends.seconds[0], at) for at in _common(ends, curve)]
        known = not any(math.isnan(gap.error) for gap in gaps)
        series.append(
            Series(
                labels[number],
                colors[number % len(colors)],
                f"equal{number}",
                [round(scale * gap.value, 4) for gap in gaps],
                low=[round(scale * (gap.value - gap.half), 4) for gap in gaps] if known else None,
                high=[round(scale * (gap.value + gap.half), 4) for gap in gaps] if known else None,
            )
        )
    return Chart(
        "equal_time",
        f"Above {labels[0]} at equal time",
        "Held-out mean over the last quarter of the time so far, minus the first run's after the same time.",
        series,
        rule=0.0,
        rule_label=labels[0],
        unit="points" if ends.measure == "accuracy" else "reward",
        wide=True,
    )


def _sentence(ends: Ends, labels: Sequence[str]) -> str:
    """A sentence with the difference of two runs at equal time and at equal updates; for more runs, one that introduces
    the table."""
    if len(labels) > 2:
        return f"Each run against {labels[0]}, after the time that all have spent."
    time, updates = _gaps(ends, 1)
    return (
        f"Minus {labels[0]}, {labels[1]} is {_text(time, ends.measure)} after {duration(ends.until)} of both, and "
        f"{_text(updates, ends.measure)} after {ends.after:,.0f} updates of both."
    )


def _gaps(ends: Ends, number: int) -> tuple[Estimate, Estimate]:
    """How far run `number` is above the first run, at equal time and at equal updates."""
    return (
        difference(ends.seconds[number], ends.until, ends.seconds[0], ends.until),
        difference(ends.updates[number], ends.after, ends.updates[0], ends.after),
    )


def _table(ends: Ends, labels: Sequence[str]) -> dict[str, Any]:
    rows = []
    for number, label in enumerate(labels):
        by_then = float(np.interp(ends.until, ends.seconds[number].spent, ends.updates[number].spent))
        gaps = _gaps(ends, number) if number else ()
        rows.append(
            {
                "name": label,
                "bold": False,
                "cells": [
                    (f"{by_then:,.0f}", ""),
                    (format_value(reached(ends.seconds[number], ends.until).value, ends.measure), ""),
                    *((_text(gap, ends.measure), "") for gap in gaps),
                    *((("–", ""), ("–", "")) if not number else ()),
                ],
            }
        )
    return {
        "title": f"After {duration(ends.until)}, and after {ends.after:,.0f} updates",
        "explains": "Time without evaluations and saves. Figures are means of a held-out curve over its last quarter. "
        "Intervals are 95 % and cover evaluation noise only: another seed's runs differ by more. With a rate that "
        "falls, the beginning of a run is worse than a run that was planned so short.",
        "head": ["Run", "Updates by then", f"Held-out {ends.measure}", "At equal time", "At equal updates"],
        "rows": rows,
    }


def _text(gap: Estimate, measure: str) -> str:
    """The difference with its interval, as in `+1.2 ± 0.8 points`."""
    scale, unit, digits = (100.0, " points", 1) if measure == "accuracy" else (1.0, "", 3)
    error = "" if math.isnan(gap.error) else f" ± {scale * gap.half:.{digits}f}"
    return f"{scale * gap.value:+.{digits}f}{error}{unit}".replace("-0.0 ", "+0.0 ")
