"""Reads a row's tests: what a program is given, and what it has to return.

The shapes that data sets of programming problems have: `inputs` and `outputs` with or without `fn_name` (APPS, TACO,
LiveCodeBench's own file), a list of {input, output, testtype}, a list of asserts (MBPP), and test code, with an entry
point (HumanEval) or without.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = ("tests", "input_output", "test_cases", "test_list", "test")
"""Columns that may hold tests, besides the gold and those that count together."""
_TOGETHER = (
    ("public_test_cases", "private_test_cases"),  # LiveCodeBench
    ("public_tests", "private_tests", "generated_tests"),  # code_contests
)


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """The whole program is given text on stdin; what it writes to stdout is compared."""

    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class FunctionTest:
    """One function is called; what it returns is compared with any of `expected`."""

    name: str
    arguments: tuple[Any, ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class AssertTest:
    """Test code that must end without an exception. `entry`: the function that its `check(candidate)` is given."""

    code: str
    entry: str = ""


Test = ProgramTest | FunctionTest | AssertTest


def read_tests(gold: object, row: Mapping[str, Any]) -> list[Test]:
    """The tests of a row: those of its first columns that hold any, else of its gold, which may be a program as well.

    Raises ValueError with what is wrong with them, or that there are none.
    """
    for names in (*_TOGETHER, *((name,) for name in COLUMNS)):
        if tests := [test for name in names for test in _read(row.get(name), row)]:
            return tests
    if tests := _read(gold, row):
        return tests
    raise ValueError(
        "the row has no tests: neither a column of tests nor its gold holds any; docs/rewards.md has their shapes"
    )


def _read(found: object, row: Mapping[str, Any]) -> list[Test]:
    """The tests that a value holds; empty where it holds none."""
    value = _loaded(found)
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        return _of_columns(value, row)
    if isinstance(value, Mapping) and "input" in value and "output" in value:
        if isinstance(value["input"], list) and isinstance(value["output"], list):
            return _of_columns({"inputs": value["input"], "outputs": value["output"]}, row)
        return [_of_case(value, row)]
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return [AssertTest(_with_setup(one, row), _entry(row)) for one in value if _asserts(one)]
        if all(isinstance(one, Mapping) and "input" in one and "output" in one for one in value):
            return [_of_case(one, row) for one in value]
        raise ValueError("tests are a list of neither asserts nor {input, output}")
    if isinstance(value, str) and _asserts(value):
        return [AssertTest(_with_setup(one, row), _entry(row)) for one in _separate(value)]
    return []


def _loaded(found: object) -> object:
    """What JSON text stands for; every other value as it is."""
    if isinstance(found, str) and found.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(found)
        except ValueError:
            return found
    return found


def _of_columns(value: Mapping[str, Any], row: Mapping[str, Any]) -> list[Test]:
    inputs, outputs = value["inputs"], value["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("tests need lists `inputs` and `outputs` of the same length")
    name = value.get("fn_name") or _function(row)
    if name:
        return [_function_test(name, given, output) for given, output in zip(inputs, outputs, strict=True)]
    return [ProgramTest(_lines(given), _lines(output)) for given, output in zip(inputs, outputs, strict=True)]


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
    """The name of the function that tests call: LiveCodeBench keeps it in `metadata`."""
    metadata = _loaded(holder.get("metadata"))
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return str(name or holder.get("fn_name") or "")


def _function_test(name: str, given: object, output: object) -> FunctionTest:
    """Text holds one argument in JSON on each line, and the result in JSON; lists are the arguments themselves.

    Beside a list, a text may be the result itself, or the result in JSON: both are right.
    """
    if isinstance(given, str):
        arguments = tuple(_value(line) for line in given.split("\n") if line.strip())
    else:
        arguments = tuple(given) if isinstance(given, list) else (given,)
    expected: tuple[Any, ...] = (_value(output),) if isinstance(output, str) else (output,)
    if isinstance(output, str) and not isinstance(given, str) and expected != (output,):
        expected = (*expected, output)
    if isinstance(output, list) and len(output) == 1 and not isinstance(given, str):
        expected = (output, output[0])  # APPS wraps some results in a list
    return FunctionTest(name, arguments, expected)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lines(value: object) -> str:
    """Text, or lines of it."""
    if isinstance(value, str):
        return value
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _entry(row: Mapping[str, Any]) -> str:
    return str(row.get("entry_point") or "")


def _with_setup(code: str, row: Mapping[str, Any]) -> str:
    setup = row.get("test_setup_code") or ""
    imports = row.get("test_imports") or []
    before: Sequence[str] = [*(imports if isinstance(imports, list) else [str(imports)]), str(setup)]
    return "\n".join([*(text for text in before if text), code])


def _asserts(code: str) -> bool:
    """Whether it is Python that asserts something."""
    try:
        return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _separate(code: str) -> list[str]:
    """Test code that ends in asserts as one test each, with what stands before them; anything else is one test."""
    lines, statements = code.splitlines(keepends=True), ast.parse(code).body
    first = len(statements)
    while first and isinstance(statements[first - 1], ast.Assert):
        first -= 1
    last = statements[first:]
    if len({one.lineno for one in last}) < max(2, len(last)):
        return [code]
    before = "".join(lines[: last[0].lineno - 1])
    return [before + "".join(lines[one.lineno - 1 : one.end_lineno]) for one in last]
