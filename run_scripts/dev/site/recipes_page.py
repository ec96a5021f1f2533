"""docs/recipes.md, of the recipes' first lines: `python -m run_scripts.dev.site.recipes_page > docs/recipes.md`."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from mugrpo_megatron.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
HEAD = """# Recipes

For everyone who looks for a recipe to begin with. `mugrpo train NAME` takes a name of this table from any directory.
[What has run where](status.md) says which of them have run; [your data, your reward, your model](your-problem.md) says
how to change one. "4 x 64 updates" means 4 stages of 64 updates. [The paper's runs](paper.md#figures-and-table) explain
the methods of the recipes in `paper/`. `make docs` makes this page from the first comment of each file in
`run_scripts/recipes/`.

| Name | What it trains; its objective; its stages x updates of a stage |
| --- | --- |
"""
PARTS = {"methods", "models"}
"""Folders of recipes that others are made of."""


def markdown() -> str:
    """The text of docs/recipes.md."""
    rows = []
    for path in sorted(RECIPES.rglob("*.toml"), key=lambda path: (len(path.relative_to(RECIPES).parts), str(path))):
        if PARTS.isdisjoint(path.relative_to(RECIPES).parts) and path.stem not in ("common", "evaluation"):
            recipe = load_recipe(path)
            schedule = f"{recipe.schedule.stages:,} x {recipe.schedule.updates_per_stage:,} updates"
            method = path.stem.rpartition(".")[2]
            about = (
                first_paragraph(path) or f"Method `{method}` on {Path(recipe.model.path).name}, for the paper's runs."
            )
            rows.append(f"| `{path.relative_to(RECIPES)}` | {about} `{recipe.objective.name}`, {schedule}. |")
    return HEAD + "\n".join(rows) + "\n"


def first_paragraph(path: Path) -> str:
    """The first paragraph of the comment at a recipe's top, without its commands, in one line; empty without one."""
    comment = re.match(r"(?:#[^\n]*\n)+", path.read_text(encoding="utf-8"))
    lines = [line[1:] for line in comment[0].splitlines()] if comment else []
    words = [line.strip() for line in takewhile(lambda line: line.strip() and not line.startswith("   "), lines)]
    text = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", " ".join(words)).replace("|", "\\|")
    return f"{text.rstrip(':. ')}." if text else ""


if __name__ == "__main__":
    print(markdown(), end="")
