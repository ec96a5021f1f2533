"""Names of data sets: short, unique, usable as TOML keys."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.arithmetic import TASKS
from mugrpo_megatron.data.problems import PRESETS, check_sets, held_out_sets, named_sources
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.metrics import is_defined
from mugrpo_megatron.recipe.scoring import MEAN, EvalSection

WORDS = st.sampled_from(["a", "b", "test", "arithmetic", "math500", "mean", "x y", "ü"])
SOURCES = st.one_of(
    st.sampled_from([*TASKS, *PRESETS]),
    st.builds("{}/{}.jsonl".format, WORDS, WORDS),
    st.builds("{}.parquet".format, WORDS),
    st.builds("math500@{}/{}.json".format, WORDS, WORDS),
    st.sampled_from(["owner/test", "other/test", "owner/test/default:train", "owner/a.b"]),
)


@given(st.lists(SOURCES, max_size=8))
def test_every_source_has_a_name_of_its_own_that_a_metric_and_a_toml_key_can_have(sources: list[str]) -> None:
    named = named_sources(" , ".join(sources))
    assert list(named.values()) == sources
    for name, source in named.items():
        assert re.fullmatch(r"[A-Za-z0-9_-]+", name)
        assert name != MEAN
        assert is_defined("eval", f"accuracy/{name}")
        if source in TASKS or source in PRESETS:
            assert re.fullmatch(rf"{source}(-\d)?", name)


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ("math500,aime24@local.parquet,data/dev.jsonl,owner/set/config:test", ["math500", "aime24", "dev", "set"]),
        ("a/test.jsonl,b/test.jsonl,c/dev.jsonl", ["a-test", "b-test", "dev"]),
        ("a/test.jsonl,a/test.parquet", ["a-test", "a-test-2"]),
        ("math500,own/math500.jsonl", ["math500", "own-math500"]),
        ("own/arithmetic.jsonl", ["own-arithmetic"]),
        ("me/mean.jsonl,one/set,two/set", ["me-mean", "one-set", "two-set"]),
    ],
)
def test_names_are_as_short_as_they_can_be(sources: str, names: list[str]) -> None:
    assert list(named_sources(sources)) == names


def test_a_held_out_set_counts_once() -> None:
    with pytest.raises(UserError, match=r"data\.eval names math500 2 times: name it once"):
        held_out_sets("math500,amc23,math500")


def test_settings_of_a_set_that_is_not_evaluated_name_those_that_are() -> None:
    section = EvalSection.model_validate({"samples": 2, "sets": {"aime24": {"samples": 32, "temperature": 0.6}}})
    check_sets(section, held_out_sets("math500,aime24").keys())
    with pytest.raises(UserError, match=r"\[eval.sets.aime24\] names no held-out set: .* are amc23, math500"):
        check_sets(section, held_out_sets("math500,amc23").keys())
    assert (section.of("aime24").samples, section.of("aime24").temperature) == (32, 0.6)
    assert (section.of("math500").samples, section.of("math500").temperature) == (2, 0.0)
