"""The grid of a sweep: which cells it has, what their recipes are, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sweep.grid import Cell, cells_of, name_of, read_grid
from mugrpo_megatron.recipe import Recipe, dump_recipe
from mugrpo_megatron.run.directory import RunDirectory


@pytest.fixture
def source(tmp_path: Path) -> RunDirectory:
    """A run directory with a resolved recipe: mu-GRPO with a threshold of its own."""
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    recipe = Recipe.model_validate({"objective": {"name": "mu_grpo", "trigger_ratio": 0.01}, "optimizer": {"lr": 1e-3}})
    directory.recipe.write_text(dump_recipe(recipe), encoding="utf-8")
    return directory


SEVEN = ("optimizer.lr", "objective.clip_low", "objective.clip_high", "objective.trigger_ratio", "optimizer.min_lr",
         "optimizer.weight_decay", "optimizer.clip_grad")  # fmt: skip
EXPLODES = "[axes]\n" + "".join(f'"{key}" = {[1 + k for k in range(59)]}\n' for key in SEVEN)
"""59 values on each of seven axes: never made, only counted."""


def cells(source: RunDirectory, *overrides: str, file: str = "") -> list[Cell]:
    path = source.path / "grid.toml"
    path.write_text(file, encoding="utf-8")
    return cells_of(read_grid(overrides, path if file else None), source, source.path.parent / "sweep")


def test_axes_multiply_and_one_value_holds_for_every_cell(source: RunDirectory) -> None:
    found = cells(source, "optimizer.lr=1e-4,2e-4", "objective.veto=none,suffix", "eval.samples=3")
    assert [cell.name for cell in found] == [
        "veto=none,lr=0.0001", "veto=suffix,lr=0.0001", "veto=none,lr=0.0002", "veto=suffix,lr=0.0002",
    ]  # fmt: skip
    assert [cell.recipe.optimizer.lr for cell in found] == [1e-4, 1e-4, 2e-4, 2e-4]
    assert {cell.recipe.eval.samples for cell in found} == {3}
    assert {cell.recipe.objective.trigger_ratio for cell in found} == {0.01}, "the run's own"
    assert [cell.recipe.run.dir.name for cell in found] == [cell.name for cell in found]


def test_an_objective_is_its_preset_and_not_a_mixture_with_the_run_s(source: RunDirectory) -> None:
    """The run's resolved recipe holds mu-GRPO's clip; GRPO with that clip would be neither."""
    for cell, name in zip(cells(source, "objective.name=grpo,gspo,mu_grpo"), ("grpo", "gspo", "mu_grpo"), strict=True):
        assert cell.recipe.objective == Recipe.model_validate({"objective": {"name": name}}).objective


def test_a_file_has_axes_and_cells_besides(source: RunDirectory) -> None:
    file = """
        set.eval.samples = 2
        axes."optimizer.lr" = [1e-4, 1e-5]
        [axes.objective]
        name = ["grpo", "mu_grpo"]
        [[cells]]
        "objective.name" = "gspo"
        "objective.clip_high" = 1.001
        """
    found = cells(source, "optimizer.lr=3e-4", file=file)  # the command line wins, here with a single value
    assert [cell.name for cell in found] == ["name=grpo", "name=mu_grpo", "clip_high=1.001,name=gspo"]
    assert {cell.recipe.optimizer.lr for cell in found} == {3e-4}
    assert found[-1].recipe.objective.clip_high == 1.001


@pytest.mark.parametrize(
    ("overrides", "file", "words"),
    [
        ([], "", "no cells"),
        (["optimizer.lr"], "", "write it as"),
        (["rollout.temperature=0.5,1.0"], "", "rollout.temperature cannot differ"),
        (["data.eval=arithmetic,gsm8k"], "", "data.eval cannot differ"),
        (["optimizer.lr=1e-4,2e-4", "run.dir=x"], "", "run.dir: each cell has its own"),
        (["optimizer.lr=1e-4,1e-4"], "", "two cells"),
        (["optimizer.lr=1e-4,-1"], "", "cell lr=-1"),
        (["objective.nam=grpo,mu_grpo"], "", "did you mean `objective.name`"),
        (["optimizer.lr.x=1,2"], "", "optimizer.lr.x: lr is a value, not a section"),
        ([], "axis = 1", "`axis` is not a table"),
        ([], "[axes]\n'optimizer.lr' = 1e-4", "needs a list"),
        ([], "[axes]\nlr = [1e-4]", "needs its section"),
        ([], "cells = 3", "write each cell"),
        (["optimizer.lr=" + ",".join(f"{k}e-9" for k in range(1, 1002))], "", "more than 1,000"),
        ([], EXPLODES, "has 2,488,651,484,819 cells, more than 1,000"),
    ],
)
def test_what_is_no_grid_is_refused(source: RunDirectory, overrides: list[str], file: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        cells(source, *overrides, file=file)


def test_names_are_file_names_and_differ_where_settings_do() -> None:
    assert name_of({"objective.surrogate": "own.losses:a/b", "objective.kl_penalty": "k3"}) == (
        "kl_penalty=k3,surrogate=own.losses_a_b"
    )
    many = [name_of({f"objective.key{n}": "x" * n for n in range(20)} | {"optimizer.lr": lr}) for lr in (1, 2)]
    assert len(set(many)) == 2
    assert all(len(name) <= 120 for name in many)
