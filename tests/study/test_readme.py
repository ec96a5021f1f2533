"""What README and the study's pages say of the studies, against their kept results."""

from __future__ import annotations

from statistics import fmean

import pytest

from run_scripts.study.findings import findings
from run_scripts.study.grid import load_grid
from run_scripts.study.page import END, with_summary
from run_scripts.study.results import DOCS, differences, read_results

README = (DOCS.parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_readme_says_of_the_study_what_its_csv_says() -> None:
    """After a change of either, run `python -m run_scripts.study.page`."""
    assert with_summary(README, read_results(load_grid())) == README


def test_the_readmes_table_has_the_studys_differences() -> None:
    results = read_results(load_grid())
    first, second = findings(results)[:2]
    best = differences(results.column("falling", "mild_decay", "after"), results.column("falling", "grpo", "after"))
    points_of = [f"{abs(100 * fmean(values)):.1f}" for values in (second.values, best, first.values)]
    assert "{} points below on one stage, {} with the best schedule".format(*points_of[:2]) in README
    assert f"{points_of[2]} points below mu-GRPO, and it still learns" in README


def test_a_readme_without_a_place_for_the_study_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a paragraph between"):
        with_summary(README.replace(END, ""), read_results(load_grid()))
