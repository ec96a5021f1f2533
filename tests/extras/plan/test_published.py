"""The plan against the paper's hours, Table 1's T_rollout and T_total, with the bundled recipes and defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from tests.checkout import ROOT
from tests.extras.plan.published import (
    FITTED,
    PUBLISHED,
    Hours,
    fitted,
    hours_row,
    memory_row,
    planned,
    published,
    speedup_row,
)

PAGE = Path(ROOT, "docs/plan.md").read_text(encoding="utf-8")
PRINTED = "python -m tests.extras.plan.published prints the rows"
WITHIN = 2.1
"""Largest factor between planned and published hours of GRPO (µ=4) and mu-GRPO, with nothing fitted."""
SPEEDUP_WITHIN = 1.8
"""The same for GRPO's hours over mu-GRPO's."""


def factor(value: float, other: float) -> float:
    """The factor, at least 1, between two figures."""
    return max(value / other, other / value)


def largest_factor(hours: Hours, other: Hours) -> float:
    return max(factor(hours.rollout, other.rollout), factor(hours.total, other.total))


@pytest.mark.parametrize(
    ("method", "rollout", "total"),
    [("grpo", 1.82, 1.53), ("m2po", 1.87, 1.49)],  # as the page's text has them
)
def test_table_1_is_copied_right(method: str, rollout: float, total: float) -> None:
    ratios = [published(model, method).over(published(model, "mu_grpo")) for model in PUBLISHED]
    assert mean(hours.rollout for hours in ratios) == pytest.approx(rollout, abs=0.006)
    assert mean(hours.total for hours in ratios) == pytest.approx(total, abs=0.006)


def test_no_plan_that_knows_model_and_schedule_alone_could_be_much_closer() -> None:
    """M2PO has mu-GRPO's schedule: one figure for both is at least the root of their ratio away from one of them."""
    ratios = [published(model, "m2po").over(published(model, "mu_grpo")) for model in PUBLISHED]
    assert max(factor(hours.rollout, 1.0) for hours in ratios) ** 0.5 > WITHIN / 1.25


@pytest.mark.parametrize("method", ["grpo", "mu_grpo"])
@pytest.mark.parametrize("model", PUBLISHED)
def test_planned_hours_are_the_papers_within_a_factor(model: str, method: str) -> None:
    assert largest_factor(planned(model, method), published(model, method)) < WITHIN


@pytest.mark.parametrize("model", PUBLISHED)
def test_planned_speedups_are_the_papers_within_a_factor(model: str) -> None:
    plan = planned(model, "grpo").over(planned(model, "mu_grpo"))
    paper = published(model, "grpo").over(published(model, "mu_grpo"))
    assert largest_factor(plan, paper) < SPEEDUP_WITHIN
    assert min(plan.rollout, plan.total) > 1


@pytest.mark.parametrize("figure", ["rollout", "total"])
def test_the_mean_planned_speedup_is_near_the_papers(figure: str) -> None:
    def speedup(hours: Callable[[str, str], Hours]) -> float:
        return mean(getattr(hours(model, "grpo").over(hours(model, "mu_grpo")), figure) for model in PUBLISHED)

    assert speedup(planned) == pytest.approx(speedup(published), rel=0.15)


@pytest.mark.parametrize("model", PUBLISHED)
def test_one_fitted_length_predicts_the_other_three_figures(model: str) -> None:
    assert 0 < FITTED[model] < 1
    assert fitted(model, "mu_grpo").rollout == pytest.approx(published(model, "mu_grpo").rollout, rel=0.02)
    assert largest_factor(fitted(model, "grpo"), published(model, "grpo")) < WITHIN
    assert factor(fitted(model, "mu_grpo").total, published(model, "mu_grpo").total) < WITHIN


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_page_has_these_figures(model: str) -> None:
    rows = [hours_row(model, method) for method in ("grpo", "mu_grpo")]
    for row in (*rows, memory_row(model)):
        assert row in PAGE, PRINTED


def test_the_page_has_the_mean_speedup() -> None:
    assert speedup_row() in PAGE, PRINTED
