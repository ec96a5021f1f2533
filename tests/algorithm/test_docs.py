"""docs/algorithm.md has a row for every preset, scope, surrogate and reduction of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.recipe.objective import PRESETS, SURROGATES

PAGE = (Path(__file__).parents[2] / "docs" / "algorithm.md").read_text(encoding="utf-8")
CHOICES = [get_args(ObjectiveSection.model_fields[name].annotation) for name in ("veto", "reduction", "ratio")]


@pytest.mark.parametrize("name", dict.fromkeys([*PRESETS, *SURROGATES, *sum(CHOICES, ())]))
def test_it_has_a_row(name: str) -> None:
    assert f"\n| `{name}`" in PAGE
