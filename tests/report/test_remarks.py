"""The paper's figures for one run, and its triggers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.report.drawing import draw
from mugrpo_megatron.report.page import page
from mugrpo_megatron.report.remarks import paper_notes, paper_remark
from mugrpo_megatron.report.triggers import Thresholds, thresholds_of, trigger_table
from tests.report.synthetic import THRESHOLDS, charts_of, recipe_of, rows_of, write_run

SETS = ("easy", "hard")


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    return read_run(write_run(tmp_path, rows_of(2, 32, eval_every=8, sets=SETS), recipe_of(2, 32)))


def test_the_papers_curves_are_the_updates_own(run: RunData) -> None:
    charts = charts_of(run)
    for id, metric in (
        ("paper_clipping", "clipped_fraction"),
        ("paper_ratio", "ratio_neg_mean"),
        ("paper_reward", "reward_mean"),
        ("paper_vetoed", "vetoed_fraction"),
    ):
        (curve,) = charts[id].series
        assert curve.y == pytest.approx([row[metric] for row in run.updates], rel=1e-5)


def test_accuracy_has_a_point_for_every_evaluation_inside_a_stage(run: RunData) -> None:
    drawing = draw(run)
    assert drawing.axes["eval"]["u"] == [0, 8, 16, 24, 32, 40, 48, 56, 64]
    *sets, mean = charts_of(run)["paper_accuracy"].series
    assert [curve.label for curve in sets] == list(SETS)
    for curve in sets:
        assert curve.y == pytest.approx([row[f"accuracy/{curve.label}"] for row in run.evals], rel=1e-5)
    assert mean.bold
    for drawn, name in ((mean.y, "accuracy/mean"), (mean.low, "low/mean"), (mean.high, "high/mean")):
        assert drawn == pytest.approx([row[name] for row in run.evals], rel=1e-5)


def test_the_page_says_which_line_of_the_papers_figures_the_run_is(run: RunData) -> None:
    objective = {"name": "grpo", "clip_low": 0.8, "clip_high": 1.2, "veto": "response"}
    run = replace(run, recipe={**run.recipe, "objective": objective})
    assert paper_remark(run) == "This run's line: grpo, µ = 32, clip [0.8, 1.2], mask S_seq"
    html = page(run)
    assert "This run&#39;s line: grpo" in html
    for title in (
        "Figures 1, 2 and 3: average accuracy",
        "Figure 2: token clipping rate",
        "Figure 3: E[ρ_t | A_t &lt; 0]",
        "Figure 4 is the time line",
        "Figure 5: average reward",
        "Figure 6: vetoed fraction",
    ):
        assert title in html


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        ("evals", "Figures 1 to 3 have no accuracy"),
        ("updates", "Figure 6 is missing"),
        ("ratio_neg_mean", "Figure 3 has no ratio"),
    ],
)
def test_a_figure_that_the_run_cannot_give_says_why(run: RunData, left_out: str, says: str) -> None:
    updates = [] if left_out == "updates" else [{**row, left_out: None} for row in run.updates]
    run = replace(run, updates=updates, evals=[] if left_out == "evals" else run.evals)
    assert says in " ".join(paper_notes(run, charts_of(run)))


def test_a_run_that_has_every_figure_only_says_where_the_fourth_is(run: RunData) -> None:
    assert [note[:8] for note in paper_notes(run, charts_of(run))] == ["Figure 4"]
    at_ends = replace(run, evals=[row for row in run.evals if not row["age"]])
    assert "eval.every_updates" in paper_notes(at_ends, charts_of(at_ends))[-1]
    no_veto = replace(run, recipe={**run.recipe, "objective": {"name": "grpo", "veto": "none"}})
    assert "Figure 6 stays at 0" in paper_notes(no_veto, charts_of(no_veto))[-1]


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
