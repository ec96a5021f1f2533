"""Functions that a recipe names are found without running the module that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.checks.preflight import check_on_paper
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.recipe.functions import check_function

MODULE = """
raise SystemExit("this module was run")
from math import sqrt as root
def near(response, gold): ...
class Judge: ...
table = {"far": near}
if table:
    late = near
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rewards.py").write_text(MODULE)
    package = tmp_path / "own_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text(MODULE)
    (package / "inner" / "rewards.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize("name", ["near", "Judge", "root", "table", "late"])
@pytest.mark.parametrize("module", ["own_rewards", "own_package", "own_package.inner.rewards"])
def test_every_name_of_a_module_is_found_and_the_module_is_not_run(module: str, name: str) -> None:
    check_function("reward.function", f"{module}:{name}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("own_rewards:nera", r"own_rewards has no nera; did you mean near\?"),
        ("own_rewards:response", r"own_rewards has no response"),
        ("own_rewards", r"it has no `:function`"),
        ("own_rewards.near", r"it has no `:function`"),
        ("own_rewards.py:near", r"No module named 'own_rewards.py'"),
        ("own_package.outer:near", r"No module named 'own_package.outer'"),
        ("elsewhere:near", r"No module named 'elsewhere'"),
        ("broken:near", r"SyntaxError"),
    ],
)
def test_a_wrong_name_is_refused_with_its_reason(name: str, why: str, here: Path) -> None:
    (here / "broken.py").write_text("def near(:")
    with pytest.raises(UserError, match=rf"reward.function '{name}' cannot be loaded \(.*{why}.*name it as module"):
        check_function("reward.function", name)


def test_modules_without_source_are_taken_for_right() -> None:
    check_function("reward.function", "math:sqrt")
    check_function("reward.function", "sys:exit")


@pytest.mark.parametrize("line", ["from math import *", "def __getattr__(name): ..."])
def test_a_module_whose_names_are_not_all_written_there_is_taken_for_right(line: str, here: Path) -> None:
    (here / "own_rewards.py").write_text(line)
    check_function("reward.function", "own_rewards:sqrt")


def test_a_dry_run_names_a_reward_function_that_is_not_there(here: Path) -> None:
    recipe = load_recipe(None, ["reward.functions.near.function=own_rewards:nera", f"run.dir={here / 'run'}"])
    with pytest.raises(UserError, match=r"reward.functions.near 'own_rewards:nera' cannot be loaded"):
        check_on_paper(recipe, lambda line: None)
    assert not (here / "run").exists()
