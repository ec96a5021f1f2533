"""The contracts of the code. Each is a function that yields a line `file:line: what is wrong` for every place that
breaks it.

`make check` fails if one is broken, and so does tests/test_code_metrics.py.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from run_scripts.dev import metrics_page, recipe_reference
from run_scripts.dev.modules import PACKAGE, ROOT, Module, docstrings, imported, module_of

EXTRAS = f"{PACKAGE}.extras"
CLOSED = {
    "algorithm": ("megatron", "sglang", f"{PACKAGE}.megatron_compat", f"{PACKAGE}.engine"),
    "data": ("megatron", "sglang", f"{PACKAGE}.megatron_compat", f"{PACKAGE}.engine"),
    "learner": ("sglang",),
    "engine": ("megatron",),
    "stages": ("megatron", "sglang"),
    "report": ("megatron", "sglang"),
}
"""Room -> what its modules must never import."""
FOREIGN = ("torch", "megatron", "sglang", "transformers")
"""Libraries that only `cpu/` may patch."""
SETTINGS = ("torch.backends", "torch.utils.deterministic.fill_uninitialized_memory")
"""Attributes that a library means its users to set."""
BANNED = {
    "guest": "auxiliary model",
    "anchor": "ref",
    "reference_logprobs": "proximal_logprobs",
    "anchor_logprobs": "ref_logprobs",
    "kept_ids": "support_ids",
    "seat": "engine slot",
    "bond": "peer failure",
    "door": "compatibility module",
    "sick": "health warning",
    "told": "reported, or text_columns",
    "taker": "sink",
    "workshop": "context",
    "own_terms": "user_*",
    "own_metrics": "user_metrics",
    "host_ahead": "prelaunched_host",
}
"""Words that no identifier and no docstring of the product may have -> the usual word for the same thing."""
PAGES = {"recipe.md": recipe_reference, "metrics.md": metrics_page}
"""Pages of docs/ that are made from the code."""


def broken(modules: Mapping[str, Module]) -> list[str]:
    """A line for every place where a contract is broken."""
    return [
        *closed_rooms(modules.values()),
        *extras_at_the_top(modules.values()),
        *circles(modules),
        *patches(modules.values()),
        *banned_names(modules.values()),
        *stale_pages(),
    ]


def closed_rooms(modules: Iterable[Module]) -> Iterator[str]:
    """No room imports what `CLOSED` forbids for it."""
    for module in modules:
        for line, name in imports(module.tree):
            if is_below(name, CLOSED.get(module.room, ())):
                yield f"{place(module, line)}: {module.room}/ imports {name}, which it is to be free of"


def extras_at_the_top(modules: Iterable[Module]) -> Iterator[str]:
    """The core imports an extra only inside a function, under the condition that needs it."""
    for module in modules:
        if not module.is_extra:
            inside = {line for node in functions(module.tree) for line, _ in imports(node)}
            for line, name in imports(module.tree):
                if is_below(name, (EXTRAS,)) and line not in inside:
                    yield f"{place(module, line)}: the core imports {name} wherever it is imported itself"


def extras_by_a_string(modules: Iterable[Module]) -> Iterator[str]:
    """The core names no extra by a string: a local import can be searched, and its types are checked."""
    pattern = re.compile(rf"{re.escape(EXTRAS)}[\w.:]*")
    for module in (module for module in modules if not module.is_extra):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value):
                yield f"{place(module, node.lineno)}: the core names {node.value!r} by a string"


def circles(modules: Mapping[str, Module]) -> list[str]:
    """No rooms import one another in a circle. The core's imports of extras are left out, since all of them are
    local."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name, _ in imported(module.tree):
            other = modules.get(module_of(name, modules))
            if other and module.name.startswith(f"{PACKAGE}.") and module.is_extra >= other.is_extra:
                rooms = module.room, other.room
                if rooms[0] != rooms[1] and rooms[0] != PACKAGE:
                    arrows[rooms[0]].add(rooms[1])
    reachable = {room: reached(room, arrows) for room in arrows}
    groups = {frozenset(o for o in reachable[room] if room in reachable.get(o, ())) for room in arrows}
    return [f"rooms import one another in a circle: {', '.join(sorted(group))}" for group in groups if group]


def reached(room: str, arrows: Mapping[str, set[str]]) -> set[str]:
    """The rooms that a room imports, directly or through others."""
    found: set[str] = set()
    rooms = [room]
    while rooms:
        for other in arrows.get(rooms.pop(), set()) - found:
            found.add(other)
            rooms.append(other)
    return found


def patches(modules: Iterable[Module]) -> Iterator[str]:
    """Only `cpu/` sets attributes of a library's modules and classes."""
    for module in modules:
        if module.room == "cpu":
            continue
        names = {local: full for full, local in imported(module.tree) if is_below(full, FOREIGN)}
        names |= {"torch": "torch"} if "torch" in {full.partition(".")[0] for full in names.values()} else {}
        for node in ast.walk(module.tree):
            for target in targets(node):
                root, _, rest = ast.unparse(target).partition(".")
                full = f"{names.get(root, '')}.{rest}"
                if root in names and not is_below(full, SETTINGS):
                    yield f"{place(module, node.lineno)}: {full} is patched outside cpu/"  # type: ignore[attr-defined]


def targets(node: ast.AST) -> list[ast.expr]:
    """The attributes that a statement or a call of setattr assigns to."""
    if isinstance(node, ast.Assign):
        return [target for target in node.targets if isinstance(target, ast.Attribute)]
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        return [ast.Attribute(node.args[0], "...")]
    return []


def banned_names(modules: Iterable[Module]) -> Iterator[str]:
    """No identifier and no docstring has a word of `BANNED`."""
    for module in modules:
        for line, text in (*identifiers(module.tree), *docstrings(module.tree)):
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)
            forms = {word.lower() for word in words} | {word.lower().removesuffix("s") for word in words}
            for word, better in BANNED.items():
                if word in forms or ("_" in word and word in text):
                    yield f"{place(module, line)}: `{word}` is banned; the field says `{better}`"


def stale_pages() -> Iterator[str]:
    """The pages in `PAGES` are what the code makes today."""
    for name, maker in PAGES.items():
        if (ROOT / "docs" / name).read_text(encoding="utf-8") != maker.markdown():
            yield f"docs/{name} is not what {maker.__name__} makes; run `make docs`"


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every identifier."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Every function and lambda."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((node.lineno, name) for name, _ in imported(node))


def is_below(name: str, tops: Iterable[str]) -> bool:
    """Whether a dotted name is one of `tops` or inside one."""
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def place(module: Module, line: int) -> str:
    return f"{module.path.relative_to(ROOT)}:{line}"
