"""The paper's figures for one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mugrpo_megatron.observe.rundata import RunData, read_run
from mugrpo_megatron.report.drawing import draw
from mugrpo_megatron.report.page import page
from mugrpo_megatron.report.remarks import paper_notes, paper_remark
from tests.report.synthetic import charts_of, recipe_of, rows_of, write_run

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
