"""Every promise of the pages has a test that the suite or a night runs: `promises.toml`."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.checkout import ROOT, text_of

PROMISES: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("promises.toml").read_text(encoding="utf-8")
)
ALL = [(page, words) for page, promises in PROMISES.items() for words in promises]


@cache
def markers(file: str) -> dict[str, set[str]]:
    """Test functions of a file: the names of the markers of each, the file's own included."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))

    def named(nodes: list[ast.expr]) -> set[str]:
        found = (re.match(r"pytest\.mark\.(\w+)", ast.unparse(node)) for node in nodes)
        return {match[1] for match in found if match}

    shared: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            shared |= named(node.value.elts if isinstance(node.value, ast.List) else [node.value])
    return {node.name: shared | named(node.decorator_list) for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("page", "words"), ALL, ids=[words[:40] for _, words in ALL])
def test_a_promise_stands_on_its_page_and_has_a_test_that_runs(page: str, words: str) -> None:
    text = text_of(page)
    assert words in text, "the page says it otherwise now"
    tests = [name.split("::") for name in PROMISES[page][words]]
    lost = [f"{file}::{name}" for file, name in tests if name not in markers(file)]
    assert tests
    assert lost == [], "a test that was renamed: name it here too"
    assert any("gpu" not in markers(file)[name] for file, name in tests)


def test_every_row_of_the_table_of_faults_is_there() -> None:
    table = (
        (ROOT / "docs/faults.md")
        .read_text(encoding="utf-8")
        .partition("## What is promised")[2]
        .partition("\n\nOn ")[0]
    )
    events = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(events) > 15
    missing = [event for event in events if not any(event.startswith(words) for words in PROMISES["docs/faults.md"])]
    assert missing == []
