"""Counts the size of the code: files, lines, imports, recipe keys, words, and how far `run` is carried.

    python -m run_scripts.code_metrics            # every figure beside its goal
    python -m run_scripts.code_metrics --check    # fails where one of `HELD` is above its bound

`make check` runs it with --check. A bound is lowered whenever a figure falls; a commit that raises one says why.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "mugrpo_megatron"
WALKS = (("train", "optimize_stage", "run"), ("train", "generate_stage", "run"))
"""(module, function, parameter) whose way through the calls is counted."""

HELD = {
    "core files": 188,
    "recipe keys": 135,
    "recipe keys that nothing shipped sets": 27,
    "modules with one importer": 36,
    "basenames that occur twice": 4,
    "circles of rooms": 0,
    "words of pages": 35_000,
}
"""Figures that may only fall. The suite holds its own CPU seconds (tests/conftest.py)."""

GOALS = {
    "core files": 190,
    "core lines": 28_000,
    "lines of extras": 9_000,
    "modules with one importer": 45,
    "basenames that occur twice": 6,
    "circles of rooms": 0,
    "recipe keys": 130,
    "recipe keys that nothing shipped sets": 30,
    "functions that run enters below optimize_stage": 25,
    "functions that run enters below generate_stage": 15,
    "lines of train.py": 70,
    "imports of train.py": 10,
    "header lines, per cent": 9,
    "words of pages": 35_000,
    "lines of tests": 28_000,
}


@dataclass(frozen=True)
class Module:
    """One product file."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def room(self) -> str:
        """The folder below the package; each extra is a room of its own."""
        folders = self.path.relative_to(ROOT).parts[:-1]
        return ".".join(folders[1:3] if folders[1:2] == ("extras",) else folders[1:2] or folders[:1])

    @property
    def is_extra(self) -> bool:
        return self.name.startswith(f"{PACKAGE}.extras")

    @property
    def header(self) -> int:
        """Lines of the docstring and of the imports at the top level."""
        docstring = self.tree.body[:1] if ast.get_docstring(self.tree) else []
        imports = [node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in (*docstring, *imports))


def product() -> dict[str, Module]:
    """Every module of the package and of checkpoints_convert by its dotted name."""
    modules = {}
    for path in sorted(path for base in (PACKAGE, "checkpoints_convert") for path in (ROOT / base).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return modules


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(dotted name of what is imported, its local name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names)


def module_of(name: str, modules: Mapping[str, Module]) -> str:
    """The module that a dotted name is of, "" for another library's."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def circles(arrows: Mapping[str, set[str]]) -> int:
    """How many sets of rooms import one another, directly or through others."""

    def reach(room: str) -> set[str]:
        reached: set[str] = set()
        rooms = [room]
        while rooms:
            for other in arrows.get(rooms.pop(), set()) - reached:
                reached.add(other)
                rooms.append(other)
        return reached

    reachable = {room: reach(room) for room in arrows}
    groups = {frozenset(o for o in reachable[room] if room in reachable.get(o, ())) for room in arrows}
    return len(groups - {frozenset()})


def walk(modules: Mapping[str, Module], module: str, function: str, parameter: str) -> list[str]:
    """The functions through which a parameter is passed on, in the order of the calls, each entered once.

    A call passes it on as an argument that is just its name, or as the object of a method.
    """
    start = f"{PACKAGE}.{module}"
    way: list[str] = []

    def enter(owner: Module, node: ast.FunctionDef, name: str) -> None:
        place = f"{owner.name}:{node.name}"
        if place in way:
            return
        way.append(place)
        names = {local: full for full, local in imported(owner.tree)}
        for call in sorted(
            (one for one in ast.walk(node) if isinstance(one, ast.Call)), key=lambda one: (one.lineno, one.col_offset)
        ):
            positions = [
                place
                for place, argument in enumerate(call.args)
                if isinstance(argument, ast.Name) and argument.id == name
            ]
            keywords = [
                word.arg for word in call.keywords if isinstance(word.value, ast.Name) and word.value.id == name
            ]
            if isinstance(call.func, ast.Name) and (positions or keywords):
                target = definition(names.get(call.func.id, f"{owner.name}.{call.func.id}"))
                if target:
                    other, callee = target
                    arguments = [*callee.args.posonlyargs, *callee.args.args]
                    passed = keywords[0] if keywords else arguments[min(positions[0], len(arguments) - 1)].arg
                    enter(other, callee, str(passed))
            elif (
                isinstance(call.func, ast.Attribute)
                and is_name(call.func.value, name)
                and (method := method_of(owner, node, name, call.func.attr, names))
            ):
                enter(method[0], method[1], "self")

    def definition(full: str) -> tuple[Module, ast.FunctionDef] | None:
        owner = modules.get(module_of(full, modules))
        name = full.rpartition(".")[2]
        if owner:
            for node in owner.tree.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return owner, node
        return None

    def method_of(
        owner: Module, node: ast.FunctionDef, name: str, attribute: str, names: Mapping[str, str]
    ) -> tuple[Module, ast.FunctionDef] | None:
        annotations = {argument.arg: argument.annotation for argument in node.args.args}
        annotation = annotations.get(name)
        if name == "self":
            classes = [one for one in owner.tree.body if isinstance(one, ast.ClassDef) and node in one.body]
        elif isinstance(annotation, ast.Name):
            full = names.get(annotation.id, f"{owner.name}.{annotation.id}")
            home = modules.get(module_of(full, modules))
            if home is None:
                return None
            owner, classes = (
                home,
                [
                    one
                    for one in home.tree.body
                    if isinstance(one, ast.ClassDef) and one.name == full.rpartition(".")[2]
                ],
            )
        else:
            return None
        for one in classes:
            for method in one.body:
                if isinstance(method, ast.FunctionDef) and method.name == attribute:
                    return owner, method
        return None

    if entrance := definition(f"{start}.{function}"):
        enter(*entrance, parameter)
    return way


def is_name(node: ast.expr, name: str) -> bool:
    """Whether an expression is just this name."""
    return isinstance(node, ast.Name) and node.id == name


def shipped_keys() -> set[str]:
    """The keys that a TOML file of run_scripts or a named objective sets."""
    from mugrpo_megatron.recipe.objective import PRESETS

    names = {f"objective.{key}" for preset in PRESETS.values() for key in preset}

    def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in table.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")

    for path in (ROOT / "run_scripts").rglob("*.toml"):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        names |= set(leaves(table))
        for part in ("set", "axes", "base"):  # grids of the study
            if isinstance(table.get(part), dict):
                names |= set(leaves(table[part]))
        for method in table.get("methods", {}).values():
            names |= set(leaves(method))
    return names


def figures() -> dict[str, float]:
    """Every figure of `GOALS`."""
    from mugrpo_megatron.recipe.load import dotted_keys

    modules = product()
    importers: dict[str, set[str]] = defaultdict(set)
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name, _ in imported(module.tree):
            other = module_of(name, modules)
            if other and other != module.name:
                importers[other].add(module.name)
                rooms = module.room, modules[other].room
                if rooms[0] != rooms[1] and rooms[0] not in (PACKAGE, "checkpoints_convert"):
                    arrows[rooms[0]].add(rooms[1])
    core = [module for module in modules.values() if not module.is_extra]
    files = [module for module in modules.values() if not module.path.name.startswith("__")]
    names = Counter(module.path.name for module in files)
    lines = sum(module.lines for module in modules.values())
    train = modules[f"{PACKAGE}.train"]
    ways = {
        f"functions that {what} enters below {name}": walk(modules, module, name, what) for module, name, what in WALKS
    }
    recipe = set(dotted_keys())
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return {
        "core files": len(core),
        "core lines": sum(module.lines for module in core),
        "lines of extras": sum(module.lines for module in modules.values() if module.is_extra),
        "modules with one importer": sum(len(importers[module.name]) == 1 for module in files),
        "basenames that occur twice": sum(count > 1 for count in names.values()),
        "circles of rooms": circles(arrows),
        "recipe keys": len(recipe),
        "recipe keys that nothing shipped sets": len(recipe - shipped_keys()),
        **{name: len(way) for name, way in ways.items()},
        "lines of train.py": train.lines,
        "imports of train.py": sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in train.tree.body),
        "header lines, per cent": round(100 * sum(module.header for module in modules.values()) / lines, 1),
        "words of pages": sum(len(path.read_text(encoding="utf-8").split()) for path in pages),
        "lines of tests": sum(path.read_text("utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py")),
    }


def main(arguments: list[str]) -> int:
    """Print the figures; 1 where --check finds one above its bound."""
    values = figures()
    over = [name for name, bound in HELD.items() if values[name] > bound]
    if "--check" in arguments:
        for name in over:
            print(
                f"{name}: {values[name]}, and at most {HELD[name]} is held (run_scripts/code_metrics.py)",
                file=sys.stderr,
            )
        return bool(over)
    for name, goal in GOALS.items():
        print(f"{name:48}{values[name]:>10,}   goal {goal:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
