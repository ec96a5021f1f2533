"""Executes a row's test code in a jail of its own, in which stand-ins replace the program's functions.

A stand-in sends each call to the jail of the program and returns the answer. So the program never sees the tests, and
what it replaces (`print`, `abs`, `__eq__`) does not affect them. Tests pass if they raise nothing, if at least one
assertion was executed, and if each assertion outside of branches and helper functions was. This file imports only the
standard library.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib
import inspect
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from mugrpo_megatron.extras.sandbox.value_codec import pack, unpack

TESTS, PROMPT = "tests.py", "prompt.py"
MODULES = ("solution", "main")
"""Modules from which test code may import the program's names."""
MODULE = object()
"""Stands for a module that the program has imported; the tests import it themselves."""


class ProgramError(Exception):
    """Raised in the tests for the program's StopIteration and StopAsyncIteration, and for its exceptions that are not
    builtin ones."""


class Program:
    def __init__(self, answers: TextIO, requests: TextIO) -> None:
        self._answers, self._requests = answers, requests

    def ask(self, what: str, **details: Any) -> Any:
        """Send a request and return its answer. If the program raised an exception, raise the same builtin one, or else
        ProgramError."""
        self._requests.write(json.dumps({"do": what, **details}) + "\n")
        self._requests.flush()
        line = self._answers.readline()
        if not line:
            raise SystemExit("the program ended")
        answer = json.loads(line)
        if "error" in answer:
            kind: Any = getattr(builtins, str(answer["error"]), None)
            known = isinstance(kind, type) and issubclass(kind, Exception)
            # StopIteration and StopAsyncIteration would end loops of the tests without a sign.
            if not known or issubclass(kind, StopIteration | StopAsyncIteration):
                kind = ProgramError
            raise kind(answer["text"])
        return unpack(answer["value"], self._stand_in)

    def _stand_in(self, packed: dict[str, Any]) -> Any:
        return MODULE if "module" in packed else StandIn(self, packed["handle"])


class StandIn:
    """Stands for a value that stays in the program's jail. It equals only itself, whatever its own `__eq__` returns."""

    def __init__(self, program: Program, number: int) -> None:
        self.__program, self.__number = program, number

    def __ask(self, what: str, **details: Any) -> Any:
        return self.__program.ask(what, on=self.__number, **details)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        packed = {name: pack(value, _handle) for name, value in options.items()}
        answer = self.__ask("call", arguments=pack(list(arguments), _handle), options=packed)
        if answer["result"] is None:
            for ours, theirs in zip(arguments, answer["arguments"], strict=True):
                _follow(ours, theirs)
        return answer["result"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__ask("attribute", name=name)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask("item", arguments=[pack(key, _handle)])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__ask("list"))

    def __len__(self) -> int:
        return int(self.__ask("len"))

    def __bool__(self) -> bool:
        return bool(self.__ask("bool"))

    def __str__(self) -> str:
        return str(self.__ask("str"))

    def __repr__(self) -> str:
        return str(self.__ask("repr"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self.__number == other.__number

    def __hash__(self) -> int:
        return self.__number

    def handle(self) -> dict[str, int]:
        return {"handle": self.__number}


def _handle(value: Any) -> Any:
    """The handle that is sent to the program for a stand-in; raises TypeError for any other value."""
    if isinstance(value, StandIn):
        return StandIn.handle(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be handed to the program")


def _follow(ours: object, theirs: object) -> None:
    """Copy what a function has changed in its argument, `theirs`, to the tests' own object, `ours`: a list may be
    sorted in place.

    Only for functions that return None: one that returns [] and empties x would otherwise pass `f(x) == sorted(x)`.
    """
    if isinstance(ours, list) and isinstance(theirs, list):
        ours[:] = theirs
    elif isinstance(ours, dict | set) and type(ours) is type(theirs):
        ours.clear()
        ours.update(theirs)


_BRANCHES = (ast.If, ast.Try, ast.Match, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_assertion(statement: ast.stmt) -> bool:
    """Whether a statement asserts: `assert`, `self.assertEqual(...)`, `with self.assertRaises(...)`."""
    calls = [statement.value] if isinstance(statement, ast.Expr) else []
    if isinstance(statement, ast.With | ast.AsyncWith):
        calls = [item.context_expr for item in statement.items]
    methods = [call.func.attr for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)]
    return isinstance(statement, ast.Assert) or any(name.startswith("assert") for name in methods)


def is_test_class(node: ast.ClassDef) -> bool:
    """Whether the methods of a class are run as tests: a TestCase, or a class `Test*` without `__init__`."""
    bases = [ast.unparse(base) for base in node.bases]
    plain = not any(isinstance(statement, ast.FunctionDef) and statement.name == "__init__" for statement in node.body)
    return any(base.endswith("TestCase") for base in bases) or (node.name.startswith("Test") and plain)


class AssertionLedger(ast.NodeTransformer):
    """Records in `noted` the line of each assertion that held; `due` has the lines of those that have to hold."""

    def __init__(self, entry: str) -> None:
        self.due: set[int] = set()
        self.noted: set[int] = set()
        self._entry = entry

    def instrument(self, text: str, name: str) -> ast.Module:
        """Parse test code and add, behind each assertion, a call of the function `name` with the assertion's line."""
        self._name = name
        tree = ast.parse(text)
        for function in self._run_by_name(tree):
            self._find_due(function.body)
        self._find_due(tree.body)
        return ast.fix_missing_locations(self.visit(tree))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [new for statement in statements for new in self._with_note(statement)])
        return super().generic_visit(node)

    def _with_note(self, statement: ast.stmt) -> list[ast.stmt]:
        if not is_assertion(statement):
            return [statement]
        note = ast.parse(f"{self._name}({statement.lineno})").body[0]
        return [statement, ast.copy_location(note, statement)]

    def _find_due(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if is_assertion(statement):
                self.due.add(statement.lineno)
            elif not isinstance(statement, _BRANCHES) or _is_main_guard(statement):
                self._find_due(getattr(statement, "body", []))

    def _run_by_name(self, tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in tree.body:
            members = node.body if isinstance(node, ast.ClassDef) and is_test_class(node) else [node]
            for member in members:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and (
                    member.name.startswith("test_") or (member.name == "check" and self._entry)
                ):
                    yield member


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def main(root: str, answered: str, requested: str, verdict: str, entry: str, names: str, library: str) -> None:
    """Execute the tests; write "passed" to the descriptor `verdict` if they pass, else raise.

    Args:
        root: directory with the files TESTS and PROMPT.
        answered, requested: descriptors of the pipes from and to the program's jail.
        entry: name of the function that `check` gets, or "".
        names: names of the program that the tests may use, joined by commas.
        library: JSON object, name that the tests may use -> module of the standard library that has it.
    """
    texts = []
    for name in (PROMPT, TESTS):
        with open(f"{root}/{name}", encoding="utf-8", errors="surrogatepass") as file:
            texts.append(file.read())
    answers = os.fdopen(int(answered), encoding="utf-8")
    program = Program(answers, os.fdopen(int(requested), "w", encoding="utf-8"))
    values = {name: value for name, value in program.ask("names").items() if not name.startswith("__")}
    for name in MODULES:
        sys.modules[name] = types.ModuleType(name)
        public = {key: value for key, value in values.items() if value is not MODULE}
        sys.modules[name].__dict__.update(public, __all__=[key for key in names.split(",") if key in public])
    ledger = AssertionLedger(entry)
    space: dict[str, Any] = {"__name__": "__main__", "__mugrpo_asserted__": ledger.noted.add}
    for name, module in json.loads(library).items():
        source = importlib.import_module(module)
        space[name] = source if name == module else getattr(source, name)
    space |= {name: values[name] for name in names.split(",") if name in values and name != entry}
    if entry:
        space[entry] = program.ask("entry", name=entry)
    if "unittest" in texts[1]:
        importlib.import_module("unittest").main = _nothing  # type: ignore[attr-defined]
    exec(compile(texts[0], PROMPT, "exec"), space)
    exec(compile(ledger.instrument(texts[1], "__mugrpo_asserted__"), TESTS, "exec"), space)
    for name, value in list(space.items()):
        if isinstance(value, type) and value.__module__ == "__main__":
            _run_class(name, value)
        elif name.startswith("test_") and isinstance(value, types.FunctionType):
            _run(value)
    if entry and callable(space.get("check")):
        _run(space["check"], space[entry])
    if missing := sorted(ledger.due - ledger.noted):
        line = texts[1].splitlines()[missing[0] - 1].strip()
        raise AssertionError(f"an assertion of the tests never ran: {line}")
    if not ledger.noted:
        raise AssertionError("no assertion ran")
    os.write(int(verdict), b"passed")


def _nothing(*_arguments: Any, **_options: Any) -> None:
    """Does nothing. Replaces `unittest.main`, because this module runs the tests, and a `setup_method` or
    `teardown_method` that a class lacks."""


def _run(function: Callable[..., Any], *arguments: Any) -> None:
    result = function(*arguments)
    if inspect.iscoroutine(result):
        asyncio.run(result)
    elif inspect.isgenerator(result):
        for _ in result:
            pass


def _run_class(name: str, kind: type) -> None:
    """Run the tests of a class, each on a new instance: a TestCase as unittest does, a class `Test*` as pytest does."""
    unittest: Any = sys.modules.get("unittest")
    if unittest is not None and issubclass(kind, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
        if problems := [*result.failures, *result.errors]:
            raise AssertionError(problems[0][1].strip().rpartition("\n")[2])
        if result.skipped or result.expectedFailures or result.unexpectedSuccesses:
            raise AssertionError("a test was skipped, or expected to fail")
    elif name.startswith("Test") and "__init__" not in vars(kind):
        for method in [attribute for attribute in dir(kind) if attribute.startswith("test_")]:
            instance = kind()
            getattr(instance, "setup_method", _nothing)()
            _run(getattr(instance, method))
            getattr(instance, "teardown_method", _nothing)()
