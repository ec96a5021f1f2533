"""Links between the pages lead to files and headings that exist, and so do the tests and scripts that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkout import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *Path(ROOT, "docs").rglob("*.md")])
NAMED = re.compile(r"(?<![\w/.])(?:tests|run_scripts)/[\w/.-]*\w/?")
OF_COMMIT = re.compile(r"`[\w/.-]+`\s+of\s+commit\s+[0-9a-f]{7,}")
"""A path of history: code that is deleted."""
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_links_lead_somewhere_and_named_tests_and_scripts_exist(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    names = [name for name in NAMED.findall(OF_COMMIT.sub("", page)) if "MODEL" not in name]
    assert [name for name in names if not Path(ROOT, name.rstrip("/")).exists()] == []
    for link in LINK.finditer(page):
        target, _, anchor = (link[1] or link[2]).partition("#")
        if "://" in target:
            continue
        linked = path.parent / target if target else path
        assert linked.exists(), f"{path}: {link[0]}"
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{path}: {link[0]}"


def test_an_anchor_is_githubs() -> None:
    assert anchors("# A `b` (c)\n```\n# no heading\n```\n## What a stage costs, and why\n### κ\n") == {
        "a-b-c",
        "what-a-stage-costs-and-why",
        "κ",
    }
