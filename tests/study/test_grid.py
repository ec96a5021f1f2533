"""The study's grid: every cell is a valid recipe, and a grid that cannot be run is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe, load_recipe
from run_scripts.study.cells import Cell, Outcome, settings
from run_scripts.study.grid import GRID, load_grid
from run_scripts.study.run import BASE

STUDY = load_grid()
RATE = 4e-5
RECIPES = {name: load_recipe(BASE, settings(STUDY, Cell(0, name, RATE))) for name in STUDY.methods}
STALE = [name for name in STUDY.methods if STUDY.shares_stage(name)]
FALLING = {"grow_decay": 64, "mild_decay": 64}
LONG = {"grpo_long": 4, "four_long": 512, "two_long": 1024}
SEVERAL = {"grpo": 4, "eight": 64, "four": 128, "grow_mild": 64, "grow": 64, **FALLING, **LONG}


def without(recipe: Recipe, *sections: str) -> Recipe:
    return recipe.model_copy(update=dict.fromkeys(sections))


@pytest.mark.parametrize("name", STUDY.methods)
def test_every_cell_is_a_recipe_of_the_same_updates_and_the_same_loss_but_for_the_objective(name: str) -> None:
    recipe = RECIPES[name]
    lengths = map(recipe.schedule.length, range(recipe.schedule.stages))
    assert recipe.schedule.total_updates == sum(lengths) == (2048 if name in LONG else 512)
    assert recipe.optimizer.lr == RATE
    assert (recipe.objective.reduction, recipe.objective.advantage) == ("token_mean", "group_std")
    assert recipe.objective.trigger_ratio == STUDY.threshold(name)
    assert recipe.data.eval == "chain"
    assert load_recipe(BASE, settings(STUDY, Cell(100, name, RATE))).data.eval == "chain_validation"
    if name not in FALLING:
        assert without(recipe, "schedule", "objective", "eval") == without(
            RECIPES["none"], "schedule", "objective", "eval"
        )


@pytest.mark.parametrize("name", STALE)
def test_cells_of_a_stage_differ_in_objective_and_rate_only(name: str) -> None:
    assert RECIPES[name].schedule.stages == 1
    assert without(RECIPES[name], "objective") == without(RECIPES["none"], "objective")
    twin = STUDY.methods[name].twin
    if twin:
        of_twin = {"veto": "none", "trigger_ratio": STUDY.trigger_ratio}
        assert RECIPES[name].objective.model_copy(update=of_twin) == RECIPES[twin].objective


def test_methods_with_several_stages_are_those_of_the_plan() -> None:
    assert {name: method.mu for name, method in STUDY.methods.items() if name not in STALE} == SEVERAL
    lengths = {name: [*map(RECIPES[name].schedule.length, range(STUDY.phases(name)))] for name in SEVERAL}
    assert lengths["grow"] == lengths["grow_decay"] == [3, 5, 9, 17, 32, 65, 127, 254]
    assert lengths["grow_mild"] == lengths["mild_decay"] == [11, 17, 24, 35, 53, 79, 117, 176]
    for name in SEVERAL:
        assert RECIPES[name].objective == RECIPES["strict" if name.startswith("grpo") else "veto"].objective
    assert (lengths["four_long"], lengths["two_long"]) == ([512] * 4, [1024] * 2)
    for falling in (RECIPES[name].optimizer for name in FALLING):
        assert (falling.decay, falling.decay_over, falling.min_lr) == ("linear", "stage", pytest.approx(RATE / 10))


def evaluated(recipe: Recipe) -> list[int]:
    """The updates after which a run evaluates, by docs/recipe.md's words on the two keys."""
    found, start = [0], 0
    for stage in range(recipe.schedule.stages):
        length = recipe.schedule.length(stage)
        if recipe.eval.every_stages and stage % recipe.eval.every_stages == 0:
            found.append(start)
        if recipe.eval.every_updates:
            found += range(start + recipe.eval.every_updates, start + length, recipe.eval.every_updates)
        start += length
    return sorted({*found, start})


@pytest.mark.parametrize("name", STUDY.methods)
def test_no_run_goes_long_without_an_evaluation_and_all_end_with_one(name: str) -> None:
    found = evaluated(RECIPES[name])
    updates = STUDY.methods[name].updates
    every = STUDY.every * updates // STUDY.updates
    assert (found[0], found[-1]) == (0, updates)
    assert max(late - early for early, late in pairwise(found)) <= every
    if name in (*STALE, *LONG, "grpo", "four", "eight"):
        assert found == [*range(0, updates + 1, every)]


def test_a_collapse_is_more_than_evaluation_noise() -> None:
    half = 1.96 * (2 * 0.25 / 500) ** 0.5
    assert not Outcome(0.5, 0.5 - 0.99 * half, 500, 1.0).collapsed
    assert Outcome(0.5, 0.5 - 1.01 * half, 500, 1.0).collapsed
    assert not Outcome(0.1, 0.9, 500, 1.0).collapsed


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("updates = 512", "updates = 510", "mu = 4 of grpo does not divide"),
        ('"veto_dual"]\nseeds', '"unknown"]\nseeds', "unknown is not in .methods"),
        ('twin = "none_dual"', 'twin = "unknown"', "unknown, which veto_dual names, is not in .methods"),
        ("seeds = [6]", "seeds = [6, 8]", r"seeds of noise has \[8\]; the study's seeds are 0 to 7"),
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
