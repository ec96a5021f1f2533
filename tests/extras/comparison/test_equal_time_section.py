"""The section about equal time: its figures are the two curves', and it is left out where they do not compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.extras.comparison.comparison import comparison
from mugrpo_megatron.extras.comparison.equal_time import difference, over_seconds, over_updates
from mugrpo_megatron.extras.comparison.equal_time_section import ends_of
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.recipe import Recipe
from tests.report.synthetic import drawing_in, write_run

UPDATES, BETWEEN = 16, 4


def run_of(folder: Path, seconds: float, accuracies: list[float], problems: int = 500) -> RunData:
    """16 updates of so many seconds each, evaluated (10 s) before the first and after every fourth."""
    rows: list[dict[str, Any]] = [{"kind": "process", "time": 0.0, "environment": {}}]
    time, stage = 0.0, 0

    def evaluate(value: float) -> None:
        nonlocal time
        rows.append({"kind": "phase", "phase": "eval", "stage": stage, "start": time, "end": time + 10})
        time += 10
        held_out = {
            "accuracy": value,
            "low": value - 0.0392,
            "high": value + 0.0392,
            "problems": problems,
            "samples": 1,
        }
        figures = {f"{key}/{name}": figure for key, figure in held_out.items() for name in ("chain", "mean")}
        update = 4 * stage
        rows.append({"kind": "eval", "time": time, "update": update, "stage": stage, "age": 0, **figures})

    evaluate(accuracies[0])
    for stage in range(UPDATES // BETWEEN):
        start = time
        for age in range(BETWEEN):
            time += seconds
            rows.append({"kind": "update", "time": time, "update": 4 * stage + age, "stage": stage, "age": age})
        rows.append({"kind": "phase", "phase": "optimize", "stage": stage, "start": start, "end": time})
        stage += 1
        evaluate(accuracies[stage])
    return read_run(write_run(folder, rows, Recipe()))


@pytest.fixture
def runs(tmp_path: Path) -> list[RunData]:
    """GRPO takes 20 s an update, the other 10."""
    return [
        run_of(tmp_path / "grpo", 20, [0.4, 0.5, 0.6, 0.7, 0.8]),
        run_of(tmp_path / "stages", 10, [0.4, 0.5, 0.6, 0.6, 0.6]),
    ]


def test_the_faster_run_is_above_at_equal_time_and_below_at_equal_updates(runs: list[RunData]) -> None:
    """After 160 s the first run has 8 updates: 0.55 to 0.6 over its last quarter. Its interval is 3.92 points."""
    ends = ends_of(runs)
    assert ends is not None
    assert (ends.until, ends.after) == (160, 16)
    html = comparison(runs)
    assert f"points after {duration(160)} of both" in html
    grpo, stages = (over_seconds(run) for run in runs)
    assert difference(stages, 160, grpo, 160).value == pytest.approx(0.6 - 0.575)
    updates = [over_updates(run) for run in runs]
    assert difference(updates[1], 16, updates[0], 16).value == pytest.approx(0.6 - 0.75)
    assert "+2.5 ±" in html
    assert "-15.0 ±" in html


def test_the_chart_has_the_difference_at_each_evaluation(runs: list[RunData]) -> None:
    drawing = drawing_in(comparison(runs))
    chart = next(chart for chart in drawing["charts"] if chart["id"] == "equal_time")
    [series] = chart["series"]
    axis = drawing["axes"][series["axis"]]
    assert axis["t"] == [40, 80, 120, 160]
    assert axis["u"] == [4, 8, 12, 16]
    grpo, stages = (over_seconds(run) for run in runs)
    gaps = [difference(stages, at, grpo, at) for at in axis["t"]]
    assert series["y"] == pytest.approx([100 * gap.value for gap in gaps], abs=1e-3)
    assert series["low"] == pytest.approx([100 * (gap.value - gap.half) for gap in gaps], abs=1e-3)


def test_runs_that_do_not_compare_have_no_section(runs: list[RunData], tmp_path: Path) -> None:
    other = run_of(tmp_path / "other", 10, [0.4] * 5, problems=100)
    unevaluated = RunData(**{name: getattr(runs[1], name) for name in RunData.__slots__} | {"evals": []})
    for second in (other, unevaluated):
        assert ends_of([runs[0], second]) is None
        assert "equal-time" not in comparison([runs[0], second])
    assert "equal-time" in comparison(runs)
