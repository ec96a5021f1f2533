"""The order of the cells: fixed by the plan, and by nothing but the outcomes of tuning and of twins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import load_recipe
from run_scripts.study.grid import GRID, Cell, Outcome, Waiting, load_grid, of_twin, settings, tuned_rate, wanted
from run_scripts.study.run import BASE

LADDER = (2.5e-6, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4, 6.4e-4, 1.28e-3)


def outcome(after: float, least_ratio: float = 0.1) -> Outcome:
    return Outcome(0.45, after, 500, least_ratio)


@pytest.mark.parametrize("best", range(len(LADDER)))
def test_tuning_climbs_to_the_best_rate_and_tries_both_its_neighbours(best: int) -> None:
    """On a ladder with one summit, from any place."""
    grid = load_grid()
    done: dict[Cell, Outcome] = {}
    while (search := tuned_rate(grid, done, "veto")).rate is None:
        (left, *_) = [cell for cell in search.cells if cell not in done]
        done[left] = outcome(0.6 - 0.01 * abs(LADDER.index(left.rate) - best))
    assert search.rate == LADDER[best]
    assert {cell.seed for cell in done} == {grid.tuning_seed}
    tried = {cell.rate for cell in done}
    assert {*LADDER[max(0, best - 1) : best + 2]} <= tried
    assert len(tried) <= 2 + abs(best - 4) + 1


def test_of_two_equal_rates_the_lower_is_tuned() -> None:
    grid = load_grid()
    done = {Cell(grid.tuning_seed, "veto", rate): outcome(0.5) for rate in LADDER}
    assert tuned_rate(grid, done, "veto").rate == LADDER[0]


def test_seeds_run_whole_and_tuned_cells_wait_for_their_rate() -> None:
    grid = load_grid()
    cells = list(wanted(grid, {}))
    fixed = [one for one in cells if isinstance(one, Cell) and one.seed != grid.tuning_seed and not one.repeat]
    contrasts, rest = fixed[: grid.seeds * 2], fixed[grid.seeds * 2 :]
    assert {(cell.method, cell.rate) for cell in contrasts} == {("none", 1.6e-4), ("veto", 1.6e-4)}
    for part in (contrasts, rest):
        assert [cell.seed for cell in part] == sorted(cell.seed for cell in part)
    assert len(rest) == len(set(fixed)) == grid.seeds * (8 + 8 + 1)
    waiting = {one for one in cells if isinstance(one, Waiting)}
    assert len(waiting) == grid.seeds * 4
    assert [one.repeat for one in cells if isinstance(one, Cell) and one.repeat] == [1, 2]
    tuned = {Cell(grid.tuning_seed, method, rate): outcome(0.5) for method in grid.methods for rate in LADDER}
    assert not any(isinstance(one, Waiting) for one in wanted(grid, tuned))


def test_a_veto_that_had_no_trigger_has_the_outcome_of_its_twin() -> None:
    grid = load_grid()
    cell = Cell(0, "veto", 4e-5)
    twin = replace(cell, method="none")
    assert of_twin(grid, {twin: outcome(0.5, 1e-4)}, cell) == outcome(0.5, 1e-4)
    assert of_twin(grid, {twin: outcome(0.5, 0.99e-4)}, cell) is None
    assert of_twin(grid, {}, cell) is None
    assert of_twin(grid, {twin: outcome(0.5)}, replace(cell, method="strict")) is None
    assert of_twin(grid, {twin: outcome(0.5)}, replace(cell, method="veto_dual")) is None


def test_a_collapse_is_more_than_evaluation_noise() -> None:
    half = 1.96 * (2 * 0.25 / 500) ** 0.5
    assert not Outcome(0.5, 0.5 - 0.99 * half, 500, 1.0).collapsed
    assert Outcome(0.5, 0.5 - 1.01 * half, 500, 1.0).collapsed
    assert not Outcome(0.1, 0.9, 500, 1.0).collapsed


def test_every_cell_is_a_recipe_and_cells_of_a_stage_differ_in_objective_and_rate_only() -> None:
    grid = load_grid()
    recipes = {name: load_recipe(BASE, settings(grid, Cell(0, name, 4e-5))) for name in grid.methods}
    for name, recipe in recipes.items():
        assert recipe.schedule.total_updates == grid.updates
        assert recipe.objective.reduction == "token_mean"
        assert recipe.objective.trigger_ratio == grid.trigger_ratio
        assert recipe.data.eval == "chain"
        if grid.shares_stage(name):
            assert recipe.schedule.stages == 1
            assert recipe.model_copy(update={"objective": None}) == recipes["none"].model_copy(
                update={"objective": None}
            )
    for name, method in grid.methods.items():
        if method.twin:
            assert recipes[name].objective.model_copy(update={"veto": "none"}) == recipes[method.twin].objective
    assert {recipe.objective.dual_clip for recipe in recipes.values()} == {None, 3.0}
    assert load_recipe(BASE, settings(grid, Cell(100, "veto", 4e-5))).data.eval == "chain_validation"
    (fresh,) = [name for name in grid.methods if not grid.shares_stage(name)]
    evaluations = recipes[fresh].schedule.stages / recipes[fresh].eval.every_stages
    assert evaluations == grid.updates / grid.every


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("updates = 512", "updates = 510", "mu = 4 of grpo does not divide"),
        ('"veto_dual"]\n\n[blocks.hot]', '"unknown"]\n\n[blocks.hot]', "unknown is not in"),
        ("start = [4e-5", "start = [5e-5", "rates of the ladder"),
        ("[noise]", "[noise", "not valid TOML"),
    ],
)
def test_a_grid_that_cannot_be_run_is_the_users_mistake(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = GRID.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "grid.toml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=says):
        load_grid(tmp_path / "grid.toml")
    with pytest.raises(UserError, match="no such grid"):
        load_grid(tmp_path / "none.toml")
