"""Ends of curves and their differences at equal time, against direct computations."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.extras.comparison.equal_time import (
    Curve,
    difference,
    over_seconds,
    over_updates,
    reached,
    seconds_until,
    weights_of_mean,
)
from mugrpo_megatron.observe.rundata import paper_seconds, read_run
from mugrpo_megatron.recipe import Recipe
from tests.report.synthetic import rows_of, write_run


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """2 to 9 points from 0 on."""
    steps = draw(st.lists(st.floats(0.5, 50), min_size=1, max_size=8))
    spent = np.cumsum([0.0, *steps])
    shares = st.lists(st.floats(0, 1), min_size=len(spent), max_size=len(spent))
    return Curve(spent, np.array(draw(shares)), np.array(draw(shares)))


@given(curves(), st.floats(0.05, 1))
def test_an_end_is_the_mean_of_the_last_quarter(curve: Curve, share: float) -> None:
    end, steps = share * curve.end, 2000
    width = end / 4 / steps
    middles = [0.75 * end + (k + 0.5) * width for k in range(steps)]
    direct = fmean(np.interp(middles, curve.spent, curve.figures))
    assert reached(curve, end).value == pytest.approx(direct, abs=1e-3)
    assert weights_of_mean(curve.spent, end).sum() == pytest.approx(1)
    assert (weights_of_mean(curve.spent, end) >= 0).all()


@given(curves(), st.floats(0.05, 1), st.floats(0.05, 1))
def test_a_difference_has_the_error_of_its_own_weights(curve: Curve, first: float, second: float) -> None:
    ends = first * curve.end, second * curve.end
    left, right = (weights_of_mean(curve.spent, end) for end in ends)
    copy = Curve(curve.spent, curve.figures, curve.errors)
    same, other = difference(curve, ends[0], curve, ends[1]), difference(curve, ends[0], copy, ends[1])
    assert same.value == pytest.approx(other.value, abs=1e-9)
    assert same.value == pytest.approx(reached(curve, ends[0]).value - reached(curve, ends[1]).value, abs=1e-9)
    assert same.error == pytest.approx(math.sqrt(((left - right) ** 2) @ curve.errors**2), abs=1e-9)
    assert other.error == pytest.approx(math.sqrt((left**2 + right**2) @ curve.errors**2), abs=1e-9)
    assert difference(curve, ends[0], curve, ends[0]).error == 0


def test_an_evaluation_without_an_interval_leaves_the_error_unknown_where_it_counts() -> None:
    curve = Curve(np.array([0.0, 2, 4, 8]), np.array([0.1, 0.2, 0.3, 0.4]), np.array([math.nan, 0.1, 0.1, 0.1]))
    assert math.isnan(reached(curve, 1).error)
    assert reached(curve, 8).error > 0


def test_no_curve_is_extrapolated() -> None:
    curve = Curve(np.array([2.0, 4]), np.array([0.1, 0.2]), np.array([0.1, 0.1]))
    for end in (5, 2.5):
        with pytest.raises(ValueError, match="do not cover"):
            reached(curve, end)


def test_the_curves_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rows_of(2, 8), Recipe()))
    updates, seconds = over_updates(run), over_seconds(run)
    assert updates.spent.tolist() == [row["update"] for row in run.evals]
    assert (np.diff(seconds.spent) > 0).all()
    assert seconds.end <= paper_seconds(run.phases)["T_total"]
    assert seconds_until(run.phases, run.last) == pytest.approx(paper_seconds(run.phases)["T_total"])


def phase(name: str, start: float, end: float) -> dict[str, object]:
    return {"phase": name, "start": start, "end": end}


def test_seconds_leave_out_evaluations_and_saves() -> None:
    phases = [
        phase("start", 0, 5),
        phase("sync", 5, 6),
        phase("generate", 6, 10),
        phase("optimize", 10, 30),
        phase("save", 14, 16),
        phase("eval", 20, 24),
        phase("sync", 30, 31),
        phase("eval", 31, 40),
    ]
    assert seconds_until(phases, 5) == 0
    assert seconds_until(phases, 8) == 3
    assert seconds_until(phases, 12) == 7
    assert seconds_until(phases, 18) == 1 + 4 + 8 - 2
    assert seconds_until(phases, 22) == 1 + 4 + 8 - 2 + 2
    assert seconds_until(phases, 40) == paper_seconds(phases)["T_total"] == 1 + 4 + 20 - 2 - 4
