"""The product's modules as data: syntax trees, rooms, imports, and the functions through which a parameter is passed
on."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "mugrpo_megatron"


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
        """The folder below the package; each extra is a room by itself."""
        folders = self.path.relative_to(ROOT).parts[:-1]
        return ".".join(folders[1:3] if folders[1:2] == ("extras",) else folders[1:2] or folders[:1])

    @property
    def is_extra(self) -> bool:
        return self.name.startswith(f"{PACKAGE}.extras")

    @property
    def header(self) -> int:
        """Number of lines of the module's docstring and of its imports at the top level."""
        docstring = self.tree.body[:1] if ast.get_docstring(self.tree) else []
        imports = [node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in (*docstring, *imports))

    @property
    def comments(self) -> int:
        return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(StringIO(self.text).readline))


def product() -> dict[str, Module]:
    """Every module of the package and of checkpoints_convert by its dotted name."""
    modules = {}
    for path in sorted(path for base in (PACKAGE, "checkpoints_convert") for path in (ROOT / base).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return modules


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (dotted name of what is imported, its local name) for each import in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def module_of(name: str, modules: Mapping[str, Module]) -> str:
    """The name of the module that defines a dotted name; "" if it is another library's."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


@dataclass(frozen=True)
class Walk:
    """The functions through which a parameter is passed on, in the order of the calls; each is entered once.

    A call passes the parameter on if one of its arguments is just the name, or if it is a method of the parameter.
    """

    modules: Mapping[str, Module]
    functions: list[str]

    def enter(self, owner: Module, function: ast.FunctionDef, name: str) -> None:
        """Follow the parameter `name` of a function of the module `owner`."""
        label = f"{owner.name}:{function.name}"
        if label in self.functions:
            return
        self.functions.append(label)
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(call.func, ast.Name):
                self._enter_function(owner, call, call.func.id, name)
            elif isinstance(call.func, ast.Attribute) and is_name(call.func.value, name):
                for home, method in self._methods(owner, function, name, call.func.attr):
                    self.enter(home, method, "self")

    def _enter_function(self, owner: Module, call: ast.Call, function: str, name: str) -> None:
        positions = [index for index, argument in enumerate(call.args) if is_name(argument, name)]
        keywords = [keyword.arg for keyword in call.keywords if is_name(keyword.value, name)]
        if positions or keywords:
            for home, callee in self.definitions(self._dotted(owner, function)):
                arguments = [*callee.args.posonlyargs, *callee.args.args]
                passed = keywords[0] if keywords else arguments[min(positions[0], len(arguments) - 1)].arg
                self.enter(home, callee, str(passed))

    def definitions(self, full: str) -> Iterator[tuple[Module, ast.FunctionDef]]:
        """Yields the function with this dotted name, if a module of the product defines it."""
        home = self.modules.get(module_of(full, self.modules))
        for node in home.tree.body if home else ():
            if home and isinstance(node, ast.FunctionDef) and node.name == full.rpartition(".")[2]:
                yield home, node

    def _methods(
        self, owner: Module, function: ast.FunctionDef, name: str, method: str
    ) -> Iterator[tuple[Module, ast.FunctionDef]]:
        """Yields the method of the class that annotates the parameter; for `self`, of the class that the function is
        in."""
        annotation = next((argument.annotation for argument in function.args.args if argument.arg == name), None)
        home: Module | None = owner
        wanted = ""
        if name != "self":
            full = self._dotted(owner, annotation.id) if isinstance(annotation, ast.Name) else ""
            home, wanted = self.modules.get(module_of(full, self.modules)), full.rpartition(".")[2]
        for node in home.tree.body if home else ():
            if isinstance(node, ast.ClassDef) and (function in node.body if name == "self" else node.name == wanted):
                for member in node.body:
                    if home and isinstance(member, ast.FunctionDef) and member.name == method:
                        yield home, member

    @staticmethod
    def _dotted(owner: Module, local: str) -> str:
        names = {name: full for full, name in imported(owner.tree)}
        return names.get(local, f"{owner.name}.{local}")


def walk(modules: Mapping[str, Module], module: str, function: str, parameter: str) -> list[str]:
    """The functions through which a parameter of `function` is passed on, beginning with `function` itself."""
    way = Walk(modules, [])
    for home, node in way.definitions(f"{PACKAGE}.{module}.{function}"):
        way.enter(home, node, parameter)
    return way.functions


def is_name(node: ast.expr, name: str) -> bool:
    """Whether an expression is just this name."""
    return isinstance(node, ast.Name) and node.id == name
