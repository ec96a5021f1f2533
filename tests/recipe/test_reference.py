"""docs/recipe.md is what the sections' docstrings make."""

from __future__ import annotations

from pathlib import Path

from run_scripts.recipe_reference import markdown
from tests.checkout import ROOT


def test_the_page_is_up_to_date() -> None:
    assert Path(ROOT, "docs/recipe.md").read_text(encoding="utf-8") == markdown(), (
        "run: python -m run_scripts.recipe_reference > docs/recipe.md"
    )
