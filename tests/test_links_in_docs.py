"""Links between the pages lead to files and headings that exist, and so do the tests and scripts that they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mugrpo_megatron.pages import page_address, slug
from tests.checkout import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *Path(ROOT, "docs").rglob("*.md")])
NAMED = re.compile(r"(?<![\w/.])(?:tests|run_scripts)/[\w/.-]*\w/?")
OF_COMMIT = re.compile(r"`[\w/.-]+`\s+of\s+commit\s+[0-9a-f]{7,}")
"""A path of history: code that is deleted."""
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page, and the ids that stand on it."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {*map(slug, headings), *re.findall(r'<a id="([^"]+)"></a>', page)}


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


def addresses() -> Iterator[tuple[str, str]]:
    """(page, heading) of every address in the package whose words are constants, and of every health warning."""
    for path in Path(ROOT, "mugrpo_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                if node.func.id == "page_address" and len(words) == len(node.args):
                    yield str(words[0]), str(words[1]) if len(words) > 1 else ""
                if node.func.id == "HealthWarning" and words:
                    yield "troubleshooting", str(words[0])


def test_an_address_that_a_message_prints_exists() -> None:
    found = set(addresses())
    assert ("troubleshooting", "leap") in found
    assert ("rewards", "programs") in found
    for name, heading in found:
        file, _, anchor = page_address(name, heading).partition("#")
        assert not anchor or anchor in anchors(Path(ROOT, file).read_text(encoding="utf-8")), (name, heading)


def test_a_key_of_the_recipe_and_a_metric_have_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, metrics = (
        anchors(Path(ROOT, f"docs/{name}.md").read_text(encoding="utf-8")) for name in ("recipe", "metrics")
    )
    assert {"objective.veto", "lora.rank", slug("`[objective]`")} <= recipe
    assert {"update.ess", "update.ratio_neg_mean"} <= metrics
    assert page_address("recipe", "objective.veto") == f"{ROOT}/docs/recipe.md#objective.veto"
    monkeypatch.chdir(ROOT)
    assert page_address("recipe", "objective.veto") == "docs/recipe.md#objective.veto"


def test_an_anchor_is_githubs() -> None:
    assert anchors("# A `b` (c)\n```\n# no heading\n```\n## What a stage costs, and why\n### κ\n") == {
        "a-b-c",
        "what-a-stage-costs-and-why",
        "κ",
    }


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_no_line_begins_with_a_percent_sign(path: Path) -> None:
    """The site's parser takes such a line for a comment, and leaves it out."""
    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    assert [f"{path.name}:{number}" for number, line in lines if line.lstrip().startswith("%")] == []
