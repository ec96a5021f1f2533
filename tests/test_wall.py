"""The wall: the core never imports an extra; it names their commands as text."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mugrpo_megatron"


def test_the_core_never_imports_an_extra() -> None:
    for path in set(PACKAGE.rglob("*.py")) - set((PACKAGE / "extras").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names]
                assert not any("mugrpo_megatron.extras" in name for name in names), f"{path}:{node.lineno}"
