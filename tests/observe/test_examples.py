"""Example responses: what is written is read, of any text, and is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.examples import (
    MAX_TEXT_CHARS,
    Example,
    example_indices,
    read_examples,
    shorten,
    write_examples,
)

WORDS = st.text(max_size=30)


@settings(max_examples=30)
@given(text=WORDS, question=WORDS, gold=WORDS, why=WORDS, reward=st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_comes_back(
    text: str, question: str, gold: str, why: str, reward: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "evaluations" / "update000001.jsonl"
    one = Example("set", "set:1", question, gold, text, "", why, reward, 3, False, {"math": reward})
    write_examples(path, [one, one])
    assert read_examples(path) == [one, one]


def test_a_long_text_keeps_both_ends(tmp_path: Path) -> None:
    text = "begin" + "x" * 10 * MAX_TEXT_CHARS + "end"
    write_examples(tmp_path / "e" / "a.jsonl", [Example("", "", "", "", text, "", "", 0.0, 1, True)])
    (one,) = read_examples(tmp_path / "e" / "a.jsonl")
    assert len(one.text) < MAX_TEXT_CHARS + 80
    assert one.text.startswith("beginxxx")
    assert one.text.endswith("xxxend")
    assert f"{len(text) - MAX_TEXT_CHARS:,} characters are left out" in one.text
    assert shorten("short") == "short"


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), count=st.integers(0, 10))
def test_places_are_of_every_set_and_distinct(sizes: list[int], count: int) -> None:
    names = [f"set{k}" for k, size in enumerate(sizes) for _ in range(size)]
    places = example_indices(names, count)
    assert len(set(places)) == len(places) == sum(min(count, size) for size in sizes)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content + b"\n")
    with pytest.raises(UserError, match=r"damaged .* the report does not need it"):
        read_examples(tmp_path / "a.jsonl")
