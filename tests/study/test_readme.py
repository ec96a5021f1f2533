"""What README says of the studies, against their kept results."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from statistics import fmean

import pytest

from run_scripts.study.grid import load_grid
from run_scripts.study.page import BEGIN, END, with_summary
from run_scripts.study.results import DOCS, differences, mean_of, percent, points, read_results

README = (DOCS.parents[1] / "README.md").read_text(encoding="utf-8")


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


@pytest.fixture
def said() -> str:
    """README's section about measurements, without the paragraph of the second study, in one line."""
    section = README.partition("## What we measured\n")[2].partition("\n## ")[0]
    head, _, rest = section.partition(BEGIN)
    return " ".join((head + rest.partition(END)[2]).split())


def test_the_readme_says_of_the_study_what_its_csv_says() -> None:
    """After a change of either, run `python -m run_scripts.study.page`."""
    assert with_summary(README, read_results(load_grid())) == README


def test_a_readme_without_a_place_for_the_study_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a paragraph between"):
        with_summary(README.replace(END, ""), read_results(load_grid()))


def test_every_figure_of_the_first_study_in_the_readme_is_that_of_its_csv(first: First, said: str) -> None:
    """Each is computed, found, and taken out; no figure is left over."""

    def mean(variant: str) -> str:
        return f"{percent(mean_of(list(first.by_seed(variant).values())))} %"

    def veto(with_veto: str, without: str) -> str:
        return points(mean_of(differences(first.by_seed(with_veto), first.by_seed(without))), 2)

    def seconds(variant: str) -> str:
        return f"{fmean(first.by_seed(variant, 'wall_s', 'clock').values()):.0f} s"

    claims = [
        f"one stage of 128 updates, mu-GRPO ends at {mean('mu_128')}, GRPO at {mean('grpo')}, "
        f"and GRPO's clip on stale responses at {mean('strict_128')}.",
        f"four stages of 128, mu-GRPO ends at {mean('long_mu_grpo')} and GRPO at {mean('long_grpo')}.",
        f"{veto('mu_grpo', 'relaxed')} points with four stages of 32 updates, "
        f"{veto('mu_128', 'relaxed_128')} with one stage of 128, "
        f"and {veto('long_mu_grpo', 'long_relaxed')} with four stages of 128.",
        f"The same 128 updates took mu-GRPO {seconds('mu_grpo')} and GRPO {seconds('grpo')}.",
        "a ratio below 0.5 (0.1 to 0.9 where the threshold was varied)",
        "364,000 parameters",
        "stages of 1,024 updates",
    ]
    rest = said
    for claim in claims:
        assert claim in rest
        rest = rest.replace(claim, "")
    assert re.findall(r"\d[\d.,]*", rest) == []


def test_the_means_are_over_as_many_seeds_as_the_readme_says(first: First, said: str) -> None:
    assert "means over five seeds" in said
    for name in ("mu_grpo", "relaxed", "mu_128", "relaxed_128", "strict_128", "grpo", "long_mu_grpo", "long_grpo"):
        assert len(first.by_seed(name)) == 5


def test_the_advice_of_the_page_has_the_first_studys_figures(first: First) -> None:
    page = (DOCS.parent / "study.md").read_text(encoding="utf-8")
    for left, right, words in (
        ("strict_128", "mu_128", "ends {} points lower with one stage of 128"),
        ("long_mu_grpo", "long_grpo", "four stages of 128 end {} points below GRPO"),
    ):
        gap = points(mean_of(differences(first.by_seed(left), first.by_seed(right))), 1)
        assert words.format(gap.removeprefix("-")) in page
