"""The study's plan: what is tuned, in which order cells come, and that every cell is a recipe that can run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import load_recipe
from run_scripts.study.grid import Cell, Grid, Waiting, best_rate, load_grid, overrides, wanted
from run_scripts.study.run import BASE

pytestmark = pytest.mark.night

GRID = """
updates = 8
rates = [1e-3, 1e-4, 1e-2]
reference = "a"

[first]
title = "First"
seeds = 3
[first.variants]
a = { title = "A", mu = 4, objective = { name = "mu_grpo" } }
b = { title = "B", mu = 2, objective = { name = "grpo" } }

[second]
title = "Second"
seeds = 2
[second.variants]
c = { title = "C", mu = 8, objective = { name = "mu_grpo", trigger_ratio = 0.1 } }
"""


@pytest.fixture
def make_grid(tmp_path: Path) -> Callable[[str], Grid]:
    def make(text: str) -> Grid:
        path = tmp_path / "grid.toml"
        path.write_text(text)
        return load_grid(path)

    return make


@pytest.fixture
def grid(make_grid: Callable[[str], Grid]) -> Grid:
    return make_grid(GRID)


def test_a_study_that_has_not_begun_tunes_every_variant_and_knows_no_rate_for_other_seeds(grid: Grid) -> None:
    cells = list(wanted(grid, {}))
    assert cells[:6] == [Cell(v, r, 0) for r in (1e-4, 1e-3, 1e-2) for v in ("a", "b")]
    assert cells[6:10] == [Waiting(v, seed) for seed in (1, 2) for v in ("a", "b")]
    assert cells[10:] == [*(Cell("c", r, 0) for r in (1e-4, 1e-3, 1e-2)), Waiting("c", 1)]


def test_the_best_rate_of_the_first_seed_gets_the_other_seeds(grid: Grid) -> None:
    done = {Cell("a", 1e-4, 0): 0.5, Cell("a", 1e-3, 0): 0.7, Cell("a", 1e-2, 0): 0.6, Cell("b", 1e-4, 0): 0.9}
    assert best_rate(grid, "a", done) == 1e-3
    assert best_rate(grid, "b", done) is None  # two of its rates are missing
    cells = list(wanted(grid, done))
    assert [c for c in cells if c.variant == "a" and c.seed] == [Cell("a", 1e-3, 1), Cell("a", 1e-3, 2)]
    assert [c for c in cells if c.variant == "b" and c.seed] == [Waiting("b", 1), Waiting("b", 2)]


def test_once_the_reference_is_tuned_its_rate_is_tried_first(grid: Grid) -> None:
    done = {Cell("a", rate, 0): accuracy for rate, accuracy in ((1e-4, 0.1), (1e-3, 0.2), (1e-2, 0.3))}
    tuning = [c for c in wanted(grid, done, ["second"]) if isinstance(c, Cell)]
    assert tuning == [Cell("c", rate, 0) for rate in (1e-2, 1e-3, 1e-4)]


def test_a_part_may_run_every_seed_at_every_rate_and_the_first_one_beyond_them(
    make_grid: Callable[[str], Grid],
) -> None:
    grid = make_grid(
        GRID.replace(
            'title = "Second"\n', 'title = "Second"\nevery_rate = true\nbeyond = [1.0, 0.1]\nbeyond_seeds = 2\n'
        )
    )
    cells = list(wanted(grid, {}, ["second"]))
    assert cells == [
        *(Cell("c", rate, seed) for seed in (0, 1) for rate in (1e-4, 1e-3, 1e-2)),
        *(Cell("c", rate, seed) for seed in (0, 1) for rate in (0.1, 1.0)),
    ]
    assert grid.all_rates() == (1e-4, 1e-3, 1e-2, 0.1, 1.0)
    done = {cell: cell.rate for cell in cells if isinstance(cell, Cell)}
    assert best_rate(grid, "c", done) == 1e-2  # those beyond do not tune


def test_a_part_may_have_a_budget_of_its_own(make_grid: Callable[[str], Grid]) -> None:
    grid = make_grid(GRID.replace('title = "Second"\n', 'title = "Second"\nupdates = 32\n'))
    assert [variant.updates for variant in grid.variants().values()] == [8, 8, 32]
    schedule = load_recipe(BASE, overrides(grid, Cell("c", 1e-4, 0))).schedule
    assert (schedule.stages, schedule.updates_per_stage) == (4, 8)


def test_a_variant_may_set_fields_of_other_sections(make_grid: Callable[[str], Grid]) -> None:
    grid = make_grid(
        GRID.replace("trigger_ratio = 0.1 } }", 'trigger_ratio = 0.1 }, settings = { "schedule.min_ess" = 0.3 } }')
    )
    assert load_recipe(BASE, overrides(grid, Cell("c", 1e-4, 0))).schedule.min_ess == 0.3


def test_other_seeds_do_not_tune(grid: Grid) -> None:
    done = {Cell("a", rate, 0): 0.5 for rate in grid.rates} | {Cell("a", 1e-2, 1): 0.99}
    assert best_rate(grid, "a", done) == 1e-4  # of equal ones the lowest


def test_every_cell_is_wanted_once_and_seeds_can_be_told(grid: Grid) -> None:
    done = {Cell(v, rate, 0): 0.5 for rate in grid.rates for v in "abc"}
    cells = list(wanted(grid, done, seeds=5))
    assert len(cells) == len(set(cells)) == 3 * (len(grid.rates) + 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("mu = 4", "mu = 3"), "mu = 3 of a does not divide updates = 8"),
        (("c = {", "a = {"), "variants a appear twice"),
        (('reference = "a"', 'reference = "z"'), "reference = 'z' is not a variant; take one of a, b, c"),
    ],
)
def test_a_grid_that_cannot_be_says_why(make_grid: Callable[[str], Grid], change: tuple[str, str], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        make_grid(GRID.replace(*change))


def test_every_cell_of_the_real_grid_is_a_valid_recipe_with_the_same_budget() -> None:
    grid = load_grid()
    base = load_recipe(BASE)
    for name, variant in grid.variants().items():
        recipe = load_recipe(BASE, overrides(grid, Cell(name, grid.rates[0], 7)))
        schedule = recipe.schedule
        assert schedule.updates_per_stage == variant.mu
        assert schedule.stages * schedule.updates_per_stage == variant.updates
        assert (recipe.optimizer.lr, recipe.run.seed) == (grid.rates[0], 7)
        assert (recipe.rollout, recipe.data, recipe.model) == (base.rollout, base.data, base.model)
        assert recipe.objective.reduction == "token_mean"
        assert schedule.stages % recipe.eval.every_stages == 0


def test_variants_of_the_real_grid_differ() -> None:
    grid = load_grid()
    recipes = [load_recipe(BASE, overrides(grid, Cell(name, 1e-4, 0))) for name in grid.variants()]
    computed = [(r.schedule, r.optimizer, r.objective.model_dump(exclude={"name"})) for r in recipes]
    assert all(one != other for place, one in enumerate(computed) for other in computed[:place])
