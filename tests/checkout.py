"""Where this checkout is: every test runs in a directory of its own, so no path is relative to it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def text_of(page: str) -> str:
    """The text of a page of this checkout, with every run of white space as one space."""
    return " ".join(Path(ROOT, page).read_text(encoding="utf-8").split())
