"""Recipes that nobody would write: each is a recipe, and stays the same one, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe
from mugrpo_megatron.recipe.load import read_toml
from tests.hostile.fuzz import ODD, changed
from tests.hostile.outcome import answered, sentence
from tests.tiny import save_model, write_recipe

pytestmark = pytest.mark.night

DEFAULT = Recipe().model_dump(mode="json", exclude_none=True)
KEYS = [f"{section}.{key}" for section, keys in DEFAULT.items() for key in keys]


def without_null(value: Any) -> Any:
    """TOML has no null, and no integer beyond 64 bits."""
    match value:
        case dict():
            return {str(key): without_null(one) for key, one in value.items() if one is not None}
        case list():
            return [without_null(one) for one in value if one is not None]
        case int() if abs(value) >= 2**63:
            return float(2**63)
        case _:
            return value


def stays_the_same(path: Path, overrides: list[str]) -> None:
    recipe = load_recipe(path, overrides)
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe


@given(changed(DEFAULT))
def test_a_changed_recipe(tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.toml"
    path.write_bytes(tomli_w.dumps(without_null(table)).encode("utf-8", "surrogatepass"))
    sentence(lambda: stays_the_same(path, []))


@given(st.lists(st.tuples(st.sampled_from(KEYS), ODD | st.text(max_size=20)), min_size=1, max_size=3))
def test_words_of_set(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, Any]]) -> None:
    path = tmp_path_factory.getbasetemp() / "empty.toml"
    path.write_bytes(b"")
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs]
    sentence(lambda: stays_the_same(path, words))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return read_toml(write_recipe(folder / "recipe.toml", save_model(folder / "model"), folder / "run"))


@given(st.data())
def test_a_dry_run(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any], data: st.DataObject) -> None:
    """The whole way of `mugrpo train` until it would import Megatron: nothing is written."""
    path = tmp_path_factory.getbasetemp() / "dry.toml"
    table = without_null(data.draw(changed(tiny, most=2)))
    path.write_bytes(tomli_w.dumps(table).encode("utf-8", "surrogatepass"))
    answered("train", path, "--dry-run")
    assert not Path(tiny["run"]["dir"]).exists()
