"""Words that docs/glossary.md has better ones for stay out of error messages, module docstrings and the README."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("mugrpo_megatron", "checkpoints_convert")
FAILURES = ("UserError", "TrainingFailure", "CollectiveFailure", "EngineFailure")
AVOIDED = (
    r"anew", r"mend", r"nobody", r"whoever", r"cannot be had", r"is none of", r"(?<!there )is no",
)  # fmt: skip
"""Regular expressions of whole words; "there is no X" is plain English, "X is no Y" is not."""
PATTERN = re.compile(rf"\b(?:{'|'.join(AVOIDED)})\b", re.IGNORECASE)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a module's docstring and of every string in the arguments of a raised failure."""
    tree = ast.parse(source)
    if docstring := ast.get_docstring(tree):
        yield 1, docstring
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FAILURES:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def avoided(text: str) -> list[str]:
    return PATTERN.findall(" ".join(text.split()))


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_and_module_docstrings_avoid_these_words(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in texts(path.read_text(encoding="utf-8"))
        for word in avoided(text)
    ]
    assert found == []


def test_the_readme_avoids_these_words() -> None:
    assert avoided((ROOT / "README.md").read_text(encoding="utf-8")) == []
