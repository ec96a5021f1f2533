"""What README says of the first study, against the study's kept results."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import pytest

from run_scripts.study.grid import load_grid
from run_scripts.study.results import CLOCK, DOCS, Results, difference, read_results
from run_scripts.study.tables import percent, points

SETTINGS = {"four stages of 32": "mu_grpo", "one stage of 128": "mu_128", "four stages of 128": "long_mu_grpo"}


@pytest.fixture(scope="module")
def results() -> Results:
    return read_results(load_grid(), DOCS)


@pytest.fixture
def said() -> str:
    """README's section about the study, in one line."""
    readme = (DOCS.parents[1] / "README.md").read_text(encoding="utf-8")
    return " ".join(readme.partition("## What we measured\n")[2].partition("\n## ")[0].split())


def test_every_figure_of_the_study_in_the_readme_is_that_of_the_kept_results(results: Results, said: str) -> None:
    """Each is computed, found, and taken out; no figure is left over."""

    def mean(variant: str) -> str:
        return f"{percent(results.mean(variant))} %"

    def veto(with_veto: str, without: str) -> str:
        return points(difference(results.by_seed(with_veto), results.by_seed(without)), 2)

    def seconds(variant: str) -> str:
        return f"{fmean(row['wall_s'] for row in results.tuned(variant, CLOCK)):.0f} s"

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


def test_what_the_readme_calls_a_setting_is_one(results: Results) -> None:
    numbers = {"one": 1, "four": 4}
    for words, name in SETTINGS.items():
        stages, _, _, mu = words.split()
        variant = results.grid.variants()[name]
        assert (variant.updates // variant.mu, variant.mu) == (numbers[stages], int(mu))


def test_the_means_are_over_as_many_seeds_as_the_readme_says(results: Results, said: str) -> None:
    assert "means over five seeds" in said
    for name in ("mu_grpo", "relaxed", "mu_128", "relaxed_128", "strict_128", "grpo", "long_mu_grpo", "long_grpo"):
        assert len(results.tuned(name)) == 5
    assert "364,000 parameters" in Path("docs/study.md").read_text(encoding="utf-8")
