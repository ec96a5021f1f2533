"""Megatron and SGLang of two versions: what differs between them stands in the compatibility modules alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPATIBILITY = (
    "mugrpo_megatron/megatron_compat.py",
    "mugrpo_megatron/engine/sglang_compat.py",
    "mugrpo_megatron/cpu/",
)
FINDERS = {"version", "Version", "installed", "parse_version"}
"""Functions that return the version of a package."""
ANSWERS = {"BUILDERS", "is_new"}
"""What the compatibility modules conclude from versions."""


def versions(node: ast.AST, names: set[str]) -> bool:
    """Whether the expression has a package's version in it; `names` are variables that hold one."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            function = part.func
            if (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) in FINDERS:
                return True
        if isinstance(part, ast.Attribute) and part.attr in {"__version__", "package_info"}:
            return True
        if isinstance(part, ast.Name) and part.id in names:
            return True
    return False


def comparisons(source: str) -> Iterator[int]:
    """Lines that compare a package's version, or ask what a compatibility module concluded from one."""
    tree = ast.parse(source)
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.ListComp) and versions(node.value, set()):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.NamedExpr) and versions(node.value, set()):
            names.add(node.target.id)
    for node in ast.walk(tree):
        is_missing = isinstance(node, ast.Compare) and all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops)
        if isinstance(node, ast.Compare) and not is_missing and versions(node, names):
            yield node.lineno
        if isinstance(node, ast.Match) and versions(node.subject, names):
            yield node.lineno
        if {getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None)} & ANSWERS:
            yield node.lineno  # type: ignore[attr-defined]


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("mugrpo_megatron", "checkpoints_convert", "run_scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if any(word in source for word in (*FINDERS, *ANSWERS, "__version__", "package_info")):
                yield path.relative_to(ROOT).as_posix(), source


def test_no_version_is_compared_outside_the_compatibility_modules() -> None:
    places = {name: lines for name, source in sources() if (lines := sorted(set(comparisons(source))))}
    assert {name for name in places if name.startswith(COMPATIBILITY)}, "the compatibility modules compare versions"
    assert {name: lines for name, lines in places.items() if not name.startswith(COMPATIBILITY)} == {}


@pytest.mark.parametrize(
    "source",
    [
        'version("sglang") >= "0.5.23"', 'new = importlib.metadata.version("megatron-core")\nif new > "0.17": pass',
        "sglang.__version__.startswith('0.5') == True", 'if (found := installed("torch")) != "2.14.1": pass',
        'match version("sglang"):\n    case "0.5.23": pass', 'parse_version(torch.__version__) < Version("2.14")',
        "from mugrpo_megatron.engine.sglang_compat import is_new", "if versions.BUILDERS: pass",
    ],
)  # fmt: skip
def test_a_comparison_is_seen(source: str) -> None:
    assert list(comparisons(source))
