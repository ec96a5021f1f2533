"""Reads a row's tests: inputs for a program, and the outputs expected of it.

Data sets of programming problems have tests in these forms: `inputs` and `outputs` with or without `fn_name` (APPS,
TACO, LiveCodeBench's own file), a list of {input, output, testtype}, a list of asserts (MBPP), and test code, with an
entry point (HumanEval) or without.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mugrpo_megatron.extras.sandbox.assert_runner import MODULES, is_assertion, is_test_class
from mugrpo_megatron.pages import page_address

COLUMNS = ("tests", "input_output", "test_cases", "test_list", "test")
"""Columns that may hold tests, besides the gold and the groups in `_TOGETHER`."""
_TOGETHER = (
    ("public_test_cases", "private_test_cases"),  # the fields of the data set LiveCodeBench
    ("public_tests", "private_tests", "generated_tests"),  # the fields of the data set code_contests
)


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """Runs the whole program with text on stdin and compares its stdout."""

    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class FunctionTest:
    """Calls one function and compares its result with any of `expected`."""

    name: str
    arguments: tuple[Any, ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class AssertTest:
    """Test code that asserts, and must end without an exception."""

    code: str
    entry: str = ""
    """Name of the function that is passed to `check(candidate)` of the test code; empty for other tests."""
    names: tuple[str, ...] = ()
    """Names in the test code that the program defines; the test code or the standard library defines all other
    names."""
    library: Mapping[str, str] = field(default_factory=dict)
    """Names of the standard library that tests use without an import -> their module."""
    prompt: str = ""
    """The definitions of the row's prompt, which the code may use."""


Test = ProgramTest | FunctionTest | AssertTest


def read_tests(gold: object, row: Mapping[str, Any]) -> list[Test]:
    """The tests of a row: from its first columns that hold any, else from its gold.

    Raises ValueError, which says what is wrong with them or that there are none.
    """
    for names in (*_TOGETHER, *((name,) for name in COLUMNS)):
        if tests := [test for name in names for test in _read(row.get(name), row)]:
            return tests
    if tests := _read(gold, row):
        return tests
    raise ValueError(
        "the row has no tests: neither a column of tests nor its gold holds any; "
        f"{page_address('rewards', 'programs')} shows how to write them"
    )


def _read(content: object, row: Mapping[str, Any]) -> list[Test]:
    """The tests in a value; empty if it holds none. Raises ValueError for malformed tests."""
    value = _loaded(content)
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        return _of_columns(value, row)
    if isinstance(value, Mapping) and "input" in value and "output" in value:
        if isinstance(value["input"], list) and isinstance(value["output"], list):
            return _of_columns({"inputs": value["input"], "outputs": value["output"]}, row)
        return [_of_case(value, row)]
    if isinstance(value, list) and value:
        if all(isinstance(test, str) for test in value):
            return [assert_test(test, row) for test in value if _asserts(test)]
        if all(isinstance(test, Mapping) and "input" in test and "output" in test for test in value):
            return [_of_case(test, row) for test in value]
        raise ValueError("the tests are a list of neither asserts nor objects {input, output}; write one of these")
    if isinstance(value, str) and _asserts(value):
        return [assert_test(test, row) for test in _separate(value)]
    return []


def _loaded(content: object) -> object:
    """The value of text that is a JSON object or list; anything else unchanged."""
    if isinstance(content, str) and content.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(content)
        except ValueError:
            return content
    return content


def _of_columns(value: Mapping[str, Any], row: Mapping[str, Any]) -> list[Test]:
    inputs, outputs = value["inputs"], value["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("tests need lists `inputs` and `outputs` of the same length")
    name = value.get("fn_name") or _function(row)
    if name:
        return [_function_test(name, arguments, output) for arguments, output in zip(inputs, outputs, strict=True)]
    return [ProgramTest(_lines(stdin), _lines(output)) for stdin, output in zip(inputs, outputs, strict=True)]


def _of_case(case: Mapping[str, Any], row: Mapping[str, Any]) -> Test:
    kind = str(case.get("testtype") or case.get("type") or "").lower()
    name = case.get("fn_name") or _function(case) or _function(row)
    if kind in ("functional", "function_call") or (not kind and name):
        if not name:
            raise ValueError("a functional test needs the function's name, as `fn_name` or in `metadata.func_name`")
        return _function_test(str(name), case["input"], case["output"])
    if kind not in ("", "stdin", "stdin_stdout"):
        raise ValueError(f"testtype {kind[:40]!r} is neither stdin nor functional")
    return ProgramTest(_lines(case["input"]), _lines(case["output"]))


def _function(holder: Mapping[str, Any]) -> str:
    """The name of the function that tests call, "" if none is given; rows of LiveCodeBench hold it in `metadata`."""
    metadata = _loaded(holder.get("metadata"))
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return str(name or holder.get("fn_name") or "")


def _function_test(name: str, inputs: object, output: object) -> FunctionTest:
    """A test that calls a function. Inputs as text have one JSON argument on each line, and their output is JSON;
    inputs as a list are the arguments themselves.

    With inputs as a list, an output that is text may be the result itself or the result in JSON: both are right.
    """
    if isinstance(inputs, str):
        arguments = tuple(_value(line) for line in inputs.split("\n") if line.strip())
    else:
        arguments = tuple(inputs) if isinstance(inputs, list) else (inputs,)
    expected: tuple[Any, ...] = (_value(output),) if isinstance(output, str) else (output,)
    if isinstance(output, str) and not isinstance(inputs, str) and expected != (output,):
        expected = (*expected, output)
    if isinstance(output, list) and len(output) == 1 and not isinstance(inputs, str):
        expected = (output, output[0])  # APPS wraps some results in a list
    return FunctionTest(name, arguments, expected)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lines(value: object) -> str:
    """A test's input or output as text. The elements of a list become lines.

    Raises ValueError for null, alone or in a list, which would become the word `None`.
    """
    if value is None or (isinstance(value, list) and None in value):
        raise ValueError("a test's input or output is null; write an empty text, or leave the test out")
    if isinstance(value, str):
        return value
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def has_tests(response: str, answer: object, row: Mapping[str, Any]) -> dict[str, Any]:
    """A reward function that ignores the response: 1 if the row has tests, else 0 with the reason."""
    try:
        read_tests(answer, row)
    except ValueError as error:
        return {"score": 0.0, "why": str(error)}
    return {"score": 1.0, "why": "it has tests"}


def assert_test(code: str, row: Mapping[str, Any]) -> AssertTest:
    """Makes a test of the code, with the row's imports and setup before it. Raises ValueError if that is not valid
    Python, or cannot test a program."""
    setup = row.get("test_setup_code") or ""
    imports = row.get("test_imports") or []
    before = [*(imports if isinstance(imports, list) else [imports]), setup]
    text = "\n".join([*(str(section) for section in before if section), code])
    entry, prompt = _entry(row), _definitions(row)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests with their imports and setup are not valid Python ({error})") from None
    if not any(_reached(tree, entry)):
        raise ValueError(
            "the tests have no assertion that would run; put one into a statement of the module, a function `test_*`, "
            "a class `Test*`, a TestCase, or `check` with an `entry_point`"
        )
    names, known = _owners(tree, ast.parse(prompt), entry)
    library = {name: name if name in sys.stdlib_module_names else library_names()[name] for name in known}
    return AssertTest(text, entry, names, library, prompt)


def _definitions(row: Mapping[str, Any]) -> str:
    """Code of the imports, functions and other definitions in the row's prompt, without stubs and the function that it
    asks for; "" if the prompt is not Python."""
    prompt = row.get("prompt")
    if not isinstance(prompt, str):
        return ""
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    definitions = [
        statement for statement in tree.body if not isinstance(statement, ast.Expr) and not _is_stub(statement)
    ]
    return "\n".join(
        ast.unparse(statement) for statement in definitions if getattr(statement, "name", "") != _entry(row)
    )


def _entry(row: Mapping[str, Any]) -> str:
    """Name of the requested function; LeetCode's is a method, `Solution().name`."""
    return str(row.get("entry_point") or "").removeprefix("Solution().")


def _is_stub(statement: ast.stmt) -> bool:
    """Whether the statement is a function whose body has only `pass` and expressions, such as a docstring or `...`."""
    return isinstance(statement, ast.FunctionDef) and all(
        isinstance(statement, ast.Expr | ast.Pass) for statement in statement.body
    )


def _reached(tree: ast.Module, entry: str) -> Iterator[ast.stmt]:
    """The assertions that can run when the row's tests run.

    They stand in the module's own statements, in tests, in functions and classes whose name occurs in the code, and,
    if there is an `entry` (the function that the row asks for), in a function `check`.
    """
    referenced = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    referenced |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    places: list[ast.AST] = list(tree.body)
    while places:
        node = places.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_run = node.name.startswith("test_") or node.name in referenced or (node.name == "check" and entry)
            places += node.body if is_run else []
        elif isinstance(node, ast.ClassDef):
            is_named = node.name in referenced and not is_test_class(node)
            methods = [member for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)]
            if is_test_class(node) or is_named:
                places += [
                    method
                    for method in methods
                    if is_named or method.name.startswith("test") or method.name in referenced
                ]
        elif isinstance(node, ast.stmt):
            if is_assertion(node):
                yield node
            places += ast.iter_child_nodes(node)
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            places += node.body


_LIBRARY = ("math", "collections", "itertools", "functools", "fractions", "decimal", "copy", "typing")
"""Modules whose names tests may use without an import."""


@cache
def library_names() -> Mapping[str, str]:
    """Public name of a module of `_LIBRARY` -> the module."""
    return {
        name: module
        for module in _LIBRARY
        for name in getattr(importlib.import_module(module), "__all__", dir(importlib.import_module(module)))
        if not name.startswith("_")
    }


def _owners(tree: ast.Module, prompt: ast.Module, entry: str) -> tuple[tuple[str, ...], list[str]]:
    """Names that the program has to define, and names of the standard library that the tests use without an import.

    The program has to define the entry point, and names that begin with a capital letter, as classes do. If there is no
    entry point, and the tests import no name from the program, it also has to define the one function that nothing else
    defines. If there are several such functions, some may be helpers that judge what another one returns. Then
    ValueError asks the row to name the one that it tests. Raises ValueError also for tests that import other packages,
    that lack a function's definition, or that use nothing of the program.
    """
    imported = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imported:
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]:
            if (root := name.partition(".")[0]) not in (*MODULES, "__future__") and root not in sys.stdlib_module_names:
                raise ValueError(
                    f"the tests import {name}; they may import the standard library, and the program as `solution` or "
                    "`main`"
                )
    explicit = any(
        (isinstance(node, ast.ImportFrom) and node.module in MODULES and node.names[0].name != "*")
        or (isinstance(node, ast.Import) and any(alias.name in MODULES for alias in node.names))
        for node in ast.walk(tree)
    )
    bound = set(_bound(tree)) | set(_bound(prompt))
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    free = sorted(name for name in loaded - bound if not name.startswith("__"))
    built_in = [name for name in free if hasattr(builtins, name)]
    known = [name for name in free if name in library_names() or name in sys.stdlib_module_names]
    unknown = [name for name in free if name not in built_in and name not in known]
    classes = [name for name in unknown if name[0].isupper()]
    functions = [name for name in unknown if name not in classes and name != entry]
    if entry or explicit:
        if functions:
            raise ValueError(f"the tests use {', '.join(functions)}, which they do not define: add test_setup_code")
        return (*([entry] if entry else []), *classes), known
    # Tests without an unknown name test a function that a library has too, such as `gcd`, or a built-in.
    if not unknown:
        functions = known or built_in
    if len(functions) > 1:
        raise ValueError(
            f"the tests use {', '.join(functions)}, and the program need not define all of them: name the function "
            "that it has to define as `entry_point`, or import it from `solution`; the others go to test_setup_code"
        )
    if not functions and not classes:
        raise ValueError("the tests use no function or class of the program; call one that they do not define")
    return (*functions, *classes), [name for name in known if name not in functions]


def _bound(tree: ast.AST) -> Iterator[str]:
    """Every name that the code binds, in any scope."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store()) | ast.arg(name):
                yield name
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar():
                yield node.name or ""
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def _asserts(code: str) -> bool:
    """Whether the text is Python code that asserts something."""
    try:
        return any(isinstance(node, ast.stmt) and is_assertion(node) for node in ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _separate(code: str) -> list[str]:
    """Split test code that ends with several asserts into one test for each of them, with all code before the asserts.

    Other test code stays one test.
    """
    lines, statements = code.splitlines(keepends=True), ast.parse(code).body
    first = len(statements)
    while first and isinstance(statements[first - 1], ast.Assert):
        first -= 1
    last = statements[first:]
    if len({statement.lineno for statement in last}) < max(2, len(last)):
        return [code]
    before = "".join(lines[: last[0].lineno - 1])
    return [before + "".join(lines[statement.lineno - 1 : statement.end_lineno]) for statement in last]
