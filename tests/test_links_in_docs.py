"""Links between the pages lead to files and headings that exist, and so do the tests and scripts that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkout import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *Path(ROOT, "docs").rglob("*.md")])
NAMED = re.compile(r"(?<![\w/.])(?:tests|run_scripts)/[\w/.-]*\w/?")
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    for found in LINK.finditer(path.read_text(encoding="utf-8")):
        target, _, anchor = (found[1] or found[2]).partition("#")
        if "://" in target:
            continue
        there = path.parent / target if target else path
        assert there.exists(), f"{path}: {found[0]}"
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{path}: {found[0]}"


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_the_tests_and_scripts_that_a_page_names_exist(path: Path) -> None:
    named = NAMED.findall(path.read_text(encoding="utf-8"))
    assert [one for one in named if "MODEL" not in one and not Path(ROOT, one.rstrip("/")).exists()] == []


def test_an_anchor_is_githubs() -> None:
    assert anchors("# A `b` (c)\n```\n# no heading\n```\n## What a stage costs, and why\n### κ\n") == {
        "a-b-c",
        "what-a-stage-costs-and-why",
        "κ",
    }
