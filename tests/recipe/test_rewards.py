"""The recipe's reward functions: names, weights, sources, and a sentence for what cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import dump_recipe, load_recipe
from mugrpo_megatron.recipe.scoring import RewardSection

OVERRIDES = [
    "reward.functions.right.function=math",
    "reward.functions.brief.function=my:brief",
    "reward.functions.brief.weight=0.5",
    'reward.functions.brief.sources=["a", "b"]',
]


def made(**functions: object) -> RewardSection:
    return RewardSection.model_validate({"functions": functions})


def test_functions_are_set_key_by_key_and_survive_the_dump(tmp_path: Path) -> None:
    recipe = load_recipe(None, OVERRIDES)
    assert {name: (one.function, one.weight, one.sources) for name, one in recipe.reward.table.items()} == {
        "right": ("math", 1.0, ()),
        "brief": ("my:brief", 0.5, ("a", "b")),
    }
    (tmp_path / "r.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "r.toml") == recipe


@pytest.mark.parametrize(
    ("function", "name"),
    [("math", "math"), ("my.module:exact_match", "exact_match"), ("my:mean", "mean_")],
)
def test_one_function_is_called_as_it_is(function: str, name: str) -> None:
    section = RewardSection(function=function)
    assert list(section.table) == [name]
    assert section.is_right_or_wrong is (function == "math")


def test_a_source_chooses_functions_and_what_a_gold_may_be() -> None:
    section = load_recipe(None, OVERRIDES).reward
    assert not section.is_right_or_wrong
    assert section.functions_of("a") == ("right", "brief")
    assert section.functions_of("c") == ("right",)
    assert not section.accepts_any_gold("a")
    own = made(code={"function": "my:code", "sources": ["code"]}, math={"function": "math", "sources": ["math"]})
    assert own.accepts_any_gold("code")
    assert not own.accepts_any_gold("math")
    own.check_sources(["code", "math"])
    with pytest.raises(UserError, match=r"scores the data source 'x', 'y': .*they name 'code', 'math'"):
        own.check_sources(["code", "x", "y", "x"])


def test_functions_replace_an_inherited_function_and_one_function_inherited_functions(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('reward.function = "my:own"\nreward.timeout_s = 3.0\n')
    (tmp_path / "several.toml").write_text('base = "one.toml"\n[reward.functions.a]\nfunction = "math"\n')
    (tmp_path / "again.toml").write_text('base = "several.toml"\nreward.function = "my:other"\n')
    (tmp_path / "both.toml").write_text('reward.function = "my:own"\n[reward.functions.a]\nfunction = "math"\n')

    def functions(name: str, *overrides: str) -> dict[str, str]:
        reward = load_recipe(tmp_path / name, overrides).reward
        assert reward.timeout_s == 3.0
        return {name: one.function for name, one in reward.table.items()}

    assert functions("several.toml") == {"a": "math"}
    assert functions("several.toml", "reward.functions.b.function=code") == {"a": "math", "b": "code"}
    assert functions("again.toml") == {"other": "my:other"}
    assert functions("one.toml", "reward.functions.b.function=code", "reward.functions.b.weight=2") == {"b": "code"}
    assert functions("several.toml", "reward.function=math") == {"math": "math"}
    for name, overrides in (
        ("both.toml", []),
        ("one.toml", ["reward.function=my:x", "reward.functions.b.function=math"]),
    ):
        with pytest.raises(UserError, match="both set"):
            load_recipe(tmp_path / name, overrides)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"function": "my:own", "functions": {"a": {"function": "math"}}}, "both set"),
        ({"functions": {"a b": {"function": "math"}}}, "letters, digits"),
        ({"functions": {"overlong": {"function": "math"}}}, "not overlong, mean"),
        ({"functions": {"a": {"function": "math", "weight": 0}}}, "every weight is 0"),
        ({"functions": {"a": {"weight": 1}}}, "Field required"),
        ({"functions": {"a": {"function": ""}}}, "at least 1 character"),
        ({"functions": {"a": {"function": "math", "wieght": 1}}}, "Extra inputs"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RewardSection.model_validate(given)
