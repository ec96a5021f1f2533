"""The panel of triggers: its curves and its table are what the rows say, and it marks the recipe's own threshold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.report.page import page
from mugrpo_megatron.report.triggers import Thresholds, thresholds_of, trigger_table
from tests.report.synthetic import THRESHOLDS, charts_of, recipe_of, rows_of, write_run

SHARES = ("trigger_tokens", "trigger_responses")
SCOPES = ("trigger", "suffix", "suffix_non_trigger", "response")


def run_of(path: Path, stages: int, updates: int, ratio: float | None = 1e-4) -> RunData:
    run = read_run(write_run(path, rows_of(stages, updates), recipe_of(stages, updates)))
    objective = {key: value for key, value in run.recipe["objective"].items() if key != "trigger_ratio"}
    setting = {} if ratio is None else {"trigger_ratio": ratio}
    return replace(run, recipe={**run.recipe, "objective": objective | setting})


def test_one_curve_a_threshold_over_the_updates_and_one_by_age_that_is_the_mean_over_stages(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3, 20)
    charts = charts_of(run)
    for metric in SHARES:
        for name, curve, aged in zip(THRESHOLDS, charts[metric].series, charts[f"{metric}_by_age"].series, strict=True):
            assert curve.label.startswith(name)
            assert curve.y == pytest.approx([row[f"{metric}_{name}"] for row in run.updates], rel=1e-5)
            by_age = [fmean(r[f"{metric}_{name}"] for r in run.updates if r["age"] == age) for age in range(20)]
            assert aged.y == pytest.approx(by_age, rel=1e-5)


def test_a_single_stage_is_not_drawn_twice(tmp_path: Path) -> None:
    assert not [name for name in charts_of(run_of(tmp_path, 1, 20)) if name.endswith("_by_age")]


def test_scopes_are_drawn_at_the_threshold_next_to_the_recipes_own(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 80, ratio=7e-4)
    chart = charts_of(run)["dropped_by_scope"]
    assert "1e-3 (nearest to 7e-4)" in chart.title
    for scope, curve in zip(SCOPES, chart.series, strict=True):
        assert curve.y == pytest.approx([row[f"dropped_{scope}_1e-3"] for row in run.updates], rel=1e-5)


@given(power=st.integers(1, 6), offset=st.floats(-0.49, 0.49))
@settings(max_examples=30)
def test_a_ratio_belongs_to_the_threshold_within_half_a_power_of_ten(power: int, offset: float) -> None:
    thresholds = Thresholds(THRESHOLDS, 10 ** (offset - power))
    assert thresholds.nearest == f"1e-{power}"
    assert [name for name in THRESHOLDS if thresholds.label(name) != name] == [f"1e-{power}"]


@pytest.mark.parametrize(
    ("ratio", "bold"),
    [(1e-3, "1e-3 (this run)"), (1.0, "1e-1 (nearest to 1)"), (0.0, "1e-6 (nearest to 0)"), (None, None)],
)
def test_the_recipes_own_threshold_is_the_bold_one(ratio: float | None, bold: str | None, tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 80, ratio)
    charts = charts_of(run)
    for metric in SHARES:
        assert [curve.label for curve in charts[metric].series if curve.bold] == [bold] * (bold is not None)
    table = trigger_table(run)
    assert table
    assert [row["name"] for row in table["rows"] if row["bold"]] == [bold] * (bold is not None)
    assert charts["ratio_neg_min"].rule == (ratio or None)


def test_table_holds_mean_and_largest_update(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2, 64)
    table = trigger_table(run)
    assert table
    assert len(table["head"]) == 1 + len(SHARES) + len(SCOPES)
    for name, row in zip(THRESHOLDS, table["rows"], strict=True):
        metrics = (*SHARES, *(f"dropped_{scope}" for scope in SCOPES))
        for metric, (mean, largest) in zip(metrics, row["cells"], strict=True):
            values = [100 * update[f"{metric}_{name}"] for update in run.updates]
            assert float(mean.removesuffix(" %")) == pytest.approx(fmean(values), rel=0.06)
            assert float(largest.removesuffix(" %")) == pytest.approx(max(values), rel=0.06)


def test_a_share_is_never_shown_as_zero_unless_it_is(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 64)
    rows = [row | {"trigger_tokens_1e-6": 0.0, "trigger_tokens_1e-5": 3e-9} for row in run.updates]
    table = trigger_table(replace(run, updates=rows))
    assert table
    assert [row["cells"][0] for row in table["rows"][-2:]] == [("0.00000030 %", "0.00000030 %"), ("0 %", "0 %")]


def test_a_run_that_did_not_measure_triggers_has_no_panel(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2, 8)
    old = ("trigger_", "dropped_", "ratio_neg_min")
    rows = [{key: value for key, value in row.items() if not key.startswith(old)} for row in run.updates]
    run = replace(run, updates=rows)
    assert thresholds_of(run).names == ()
    assert trigger_table(run) is None
    assert "Triggers by threshold" not in page(run)
    assert "Triggers by threshold" in page(run_of(tmp_path / "new", 2, 8))
