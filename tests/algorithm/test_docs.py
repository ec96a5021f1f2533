"""docs/algorithm.md quotes the code; quotes and code stay the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mugrpo_megatron.recipe.objective import PRESETS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "algorithm.md").read_text()
ROOM = ROOT / "mugrpo_megatron" / "algorithm"
QUOTES = re.findall(r"`(\w+\.py)`:\s`([^`]+)`", TEXT) + [
    ("veto.py", quote) for quote in re.findall(r"`(\"\w+\": lambda triggers[^`]+)`", TEXT)
]


@pytest.mark.parametrize(("file", "quote"), QUOTES)
def test_quoted_lines_are_in_the_code(file: str, quote: str) -> None:
    assert quote.replace(r"\|", "|") in (ROOM / file).read_text()


def test_there_are_quotes_and_every_preset_has_a_row() -> None:
    assert len(QUOTES) >= 25
    for name in PRESETS:
        assert f"| `{name}` |" in TEXT
