"""What README and the study's pages say of the studies, against their kept results."""

from __future__ import annotations

import csv
from collections import defaultdict
from statistics import fmean

import pytest

from run_scripts.study.findings import findings
from run_scripts.study.grid import load_grid
from run_scripts.study.page import END, with_summary
from run_scripts.study.results import DOCS, differences, mean_of, points, read_results

README = (DOCS.parents[1] / "README.md").read_text(encoding="utf-8")
RECORD = " ".join((DOCS / "first.md").read_text(encoding="utf-8").split())


class First:
    """The first study's cells, at the rate that the best first seed of each variant had."""

    def __init__(self) -> None:
        with (DOCS / "first" / "cells.csv").open(newline="", encoding="utf-8") as file:
            self.rows = list(csv.DictReader(file))

    def by_seed(self, variant: str, column: str = "accuracy", kind: str = "study") -> dict[int, float]:
        rates = defaultdict(list)
        for row in self.rows:
            if (row["kind"], row["variant"]) == ("study", variant) and 1e-4 <= float(row["rate"]) <= 4e-4:
                rates[row["rate"]].append((int(row["seed"]), float(row["accuracy"])))
        best = max(rates, key=lambda rate: (dict(rates[rate])[0], -float(rate)))
        return {
            int(row["seed"]): float(row[column])
            for row in self.rows
            if (row["kind"], row["variant"], row["rate"]) == (kind, variant, best)
        }


@pytest.fixture(scope="module")
def first() -> First:
    return First()


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


@pytest.mark.parametrize(
    ("left", "right", "digits"),
    [
        ("mu_grpo", "grpo", 1),
        ("mu_128", "grpo", 1),
        ("long_mu_grpo", "long_grpo", 1),
        ("strict_128", "mu_128", 1),
        ("mu_grpo", "relaxed", 2),
        ("mu_128", "relaxed_128", 2),
        ("long_mu_grpo", "long_relaxed", 2),
    ],
)
def test_the_record_of_the_first_study_has_the_differences_of_its_csv(
    first: First, left: str, right: str, digits: int
) -> None:
    cells = [first.by_seed(name) for name in (left, right)]
    assert [len(one) for one in cells] == [5, 5]
    assert points(mean_of(differences(*cells)), digits) in RECORD


def test_the_record_has_the_seconds_of_its_csv(first: First) -> None:
    seconds = [fmean(first.by_seed(name, "wall_s", "clock").values()) for name in ("mu_grpo", "grpo")]
    assert "took mu-GRPO {:.0f} s and GRPO {:.0f} s".format(*seconds) in RECORD
