"""A recipe of an earlier version: removed keys at their former default change nothing, others name the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import assume, given
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe, dump_recipe, load_recipe
from mugrpo_megatron.recipe.functions import source_sum
from mugrpo_megatron.recipe.load import dotted_keys, validate
from mugrpo_megatron.recipe.removed import KEYS, RENAMED, VALUES

ROOT = Path(__file__).parents[2]
SCALARS = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)


def table_of(key: str, value: object) -> dict[str, Any]:
    section, name = key.split(".")
    return {section: {name: value}}


@pytest.mark.parametrize("key", KEYS)
def test_a_removed_key_at_its_former_default_changes_nothing(key: str, tmp_path: Path) -> None:
    """In a run's own recipe, which holds every key, in one that is a base, and as an override."""
    resolved = tmp_path / "recipe.toml"
    text = dump_recipe(load_recipe(None, ["optimizer.lr=3e-5", "learner.threads=1"]))
    section, name = key.split(".")
    held = tomli_w.dumps({name: KEYS[key].default})
    resolved.write_text(text.replace(f"[{section}]\n", f"[{section}]\n{held}"), encoding="utf-8")
    assert held in resolved.read_text(encoding="utf-8")
    above = tmp_path / "above.toml"
    above.write_text('base = "recipe.toml"\n[run]\nseed = 7\n', encoding="utf-8")
    assert dump_recipe(load_recipe(resolved)) == text
    assert load_recipe(above).optimizer.lr == 3e-5
    assert load_recipe(None, [f"{key}={KEYS[key].default}"]) == Recipe()


@given(value=SCALARS | st.lists(SCALARS, max_size=2))
@pytest.mark.parametrize("key", KEYS)
def test_a_removed_key_with_another_value_says_since_when_and_the_way_out(key: str, value: Any) -> None:
    removed = KEYS[key]
    assume(isinstance(value, bool) or value != removed.default)
    with pytest.raises(UserError) as refusal:
        validate(table_of(key, value), "my.toml")
    said = str(refusal.value)
    assert said.startswith(f"my.toml: `{key}` = ")
    for part in (removed.since, removed.why, removed.instead):
        assert part in said


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_a_removed_value_says_since_when_and_the_way_out(key: str, value: str) -> None:
    removed = VALUES[key, value]
    with pytest.raises(UserError) as refusal:
        load_recipe(None, [f"{key}={value}"])
    said = str(refusal.value)
    assert said == (
        f"--set {key}={value}: `{key}` = '{value}': this value was removed on {removed.since}, because {removed.why}; "
        f"{removed.instead}"
    )


@pytest.mark.parametrize(("key", "former"), RENAMED)
def test_a_former_name_means_the_new_one(key: str, former: str) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load_recipe(None, [f"{key}={former}"]), section), name) == RENAMED[key, former]


def test_what_scores_problems_of_reasoning_gym_is_no_file_of_the_user() -> None:
    """Else a run would not continue once the package of that name is updated, or its name here has changed."""
    assert [source_sum(name) for name in RENAMED.values()] == [""]


def test_no_removed_name_is_in_use() -> None:
    assert not KEYS.keys() & set(dotted_keys())
    assert {key for key, _ in VALUES.keys() | RENAMED.keys()} <= set(dotted_keys())


def test_the_changelog_lists_what_was_removed_and_renamed() -> None:
    rows = [line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    first = [row.split(" | ")[0] for row in rows]
    named = set(re.findall(r'`([a-z_]+\.[a-z_]+)(?: = "([^"]*)")?`', " ".join(first)))
    recipe = {name for name in named if name[0].split(".")[0] in Recipe.model_fields}
    assert recipe == {(key, "") for key in KEYS} | VALUES.keys() | RENAMED.keys()
