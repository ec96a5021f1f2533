"""The paper's numbers on our pages: Table 1 agrees with itself, and what is said of it follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest

from tests.checkout import ROOT

PAGE = Path(ROOT, "docs/paper.md").read_text(encoding="utf-8")
README = Path(ROOT, "README.md").read_text(encoding="utf-8")
SETS = 5
METHODS = ("grpo", "grpo_mu1024", "m2po", "mu_grpo")
AVERAGE, ROLLOUT, TOTAL = SETS, SETS + 1, SETS + 2
"""Columns of Table 1 after the sets."""

Table = Mapping[str, Mapping[str, list[float]]]


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the first table whose first line starts with `heading`, without that line and its rule."""
    lines = PAGE[PAGE.index(heading) :].splitlines()[2:]
    ends = next((place for place, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[:ends]]


@pytest.fixture(scope="module")
def table() -> Table:
    """Model -> method -> the row's numbers."""
    found: dict[str, dict[str, list[float]]] = {}
    model = ""
    for name, method, *numbers in rows_of("| Model | Method | AMC23"):
        model = name or model
        found.setdefault(model, {})[method] = [float(number) for number in numbers]
    return found


def against_grpo(row: Mapping[str, list[float]]) -> list[float]:
    """Points of the average, times less of both hours, points of GRPO at µ=1024: mu-GRPO's and its, against GRPO's."""
    grpo, mu = row["grpo"], row["mu_grpo"]
    less = [grpo[column] / mu[column] for column in (ROLLOUT, TOTAL)]
    return [mu[AVERAGE] - grpo[AVERAGE], *less, row["grpo_mu1024"][AVERAGE] - grpo[AVERAGE]]


def test_table_1_has_five_models_and_four_methods(table: Table) -> None:
    assert [tuple(row) for row in table.values()] == [METHODS] * 5
    assert all(len(numbers) == SETS + 3 for row in table.values() for numbers in row.values())


def test_an_average_is_that_of_its_sets(table: Table) -> None:
    """Each entry was rounded to a tenth: the sets' mean and the average may differ by two roundings."""
    for model, row in table.items():
        for method, numbers in row.items():
            assert numbers[AVERAGE] == pytest.approx(fmean(numbers[:SETS]), abs=0.101), (model, method)


def test_what_follows_from_table_1_follows_from_it(table: Table) -> None:
    *models, (name, *means) = rows_of("| Model | Avg., points")
    assert [row[0] for row in models] == list(table)
    expected = [against_grpo(row) for row in table.values()]
    for (model, *shown), numbers in zip(models, expected, strict=True):
        assert [float(one) for one in shown] == pytest.approx(numbers, abs=0.0051), model
    assert name == "mean"
    columns = [fmean(column) for column in zip(*expected, strict=True)]
    assert [float(means[0]), float(means[3])] == pytest.approx([columns[0], columns[3]], abs=0.051)
    assert [float(means[1]), float(means[2])] == pytest.approx(columns[1:3], abs=0.0051)


def test_the_readme_says_what_table_1_says(table: Table) -> None:
    points, rollout, total, strict = (list(column) for column in zip(*map(against_grpo, table.values()), strict=True))
    worst = list(table)[points.index(min(points))]
    best = sorted(points)
    assert f"{fmean(total):.2f} times as long ({min(total):.2f} to {max(total):.2f} by model)" in README
    assert fmean(rollout) == pytest.approx(1.82, abs=0.01)  # the page's own mean, of hours that are not rounded
    assert f"{best[1]:.1f} to {best[-1]:.1f} points above GRPO's on four models" in README
    assert f"{-best[0]:.1f} points below it on {worst}" in README
    assert f"{-max(strict):.1f} to {-min(strict):.1f} points below GRPO on all five models" in README
