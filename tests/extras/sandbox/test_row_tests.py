"""Tests of programs are read from the shapes that data sets have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mugrpo_megatron.extras.sandbox.code import program_in
from mugrpo_megatron.extras.sandbox.row_tests import AssertTest, FunctionTest, ProgramTest, read_tests

ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADDS = [ProgramTest("1 2\n", "3\n"), ProgramTest("3 4\n", "7\n")]
CASES = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}, {"input": "3 4\n", "output": "7\n"}]


@pytest.mark.parametrize(
    ("gold", "row", "tests"),
    [
        (json.dumps(ADD), {}, ADDS),
        (ADD, {}, ADDS),
        ("", {"input_output": json.dumps(ADD)}, ADDS),
        ("", {"tests": CASES}, ADDS),
        ("ignored", {"test_cases": json.dumps(CASES)}, ADDS),
        ("", {"public_tests": {"input": ["1 2\n"], "output": ["3\n"]}, "private_tests": CASES[1:]}, ADDS),
        ("assert f(1)", {"tests": CASES}, ADDS),
        ("", {"public_test_cases": json.dumps(CASES[:1]), "private_test_cases": json.dumps(CASES[1:])}, ADDS),
        ({"inputs": [["1 2"]], "outputs": [["3"]]}, {}, [ProgramTest("1 2", "3")]),
        (
            {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},
            {},
            [FunctionTest("add", (1, 2), ([3], 3))],
        ),
        (
            [{"input": '[1, 2]\n"a"', "output": "[3]", "testtype": "functional"}],
            {"metadata": '{"func_name": "add"}'},
            [FunctionTest("add", ([1, 2], "a"), ([3],))],
        ),
        (
            [{"input": "5", "output": "text", "testtype": "functional", "metadata": {"func_name": "f"}}],
            {},
            [FunctionTest("f", (5,), ("text",))],
        ),
        (
            {"fn_name": "f", "inputs": [["6"], ["a"]], "outputs": ["6", "b"]},
            {},
            [FunctionTest("f", ("6",), (6, "6")), FunctionTest("f", ("a",), ("b",))],
        ),
        (
            "",
            {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": "import math"},
            [AssertTest(f"import math\nassert f({x}) == {x + 1}", "", ("f",)) for x in (1, 2)],
        ),
        (
            "x = 1\nassert f(x) == 2\nassert f(2) == 3\n",
            {},
            [AssertTest(f"x = 1\nassert f({x}\n", "", ("f",)) for x in ("x) == 2", "2) == 3")],
        ),
        (
            "",
            {"test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"},
            [AssertTest("def check(candidate):\n    assert candidate(1) == 2\n", "f", ("f",))],
        ),
        (
            "",
            {"test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "Solution().f"},
            [AssertTest("def check(candidate):\n    assert candidate(1) == 2\n", "f", ("f",))],
        ),
        (
            "x = []\nassert f(x) == 2\nx.append(1)\n",
            {},
            [AssertTest("x = []\nassert f(x) == 2\nx.append(1)\n", "", ("f",))],
        ),
    ],
)
def test_shapes(gold: Any, row: dict[str, Any], tests: list[Any]) -> None:
    assert read_tests(gold, row) == tests


@pytest.mark.parametrize(
    ("gold", "row", "why"),
    [
        ("42", {}, "the row has no tests"),
        ("", {"test_list": ["f(1)"]}, "no tests"),
        ({"inputs": ["1"], "outputs": []}, {}, "of the same length"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], {}, "needs the function's name"),
        ([{"input": "1", "output": "2", "testtype": "graphical"}], {}, "neither stdin nor functional"),
        ([1, 2], {}, "neither asserts nor"),
        ({"inputs": [""], "outputs": [None]}, {}, "input or output is null"),
        ({"inputs": [""], "outputs": [[None]]}, {}, "input or output is null"),
        ([{"input": "1", "output": None}], {}, "input or output is null"),
    ],
)
def test_rows_without_usable_tests_are_refused(gold: Any, row: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_tests(gold, row)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("so\n```python\na\n```\nand\n```py\nb\n```\nas above", "b\n"),
        ("```python\na\n```\noutput:\n```\n3\n```", "a\n"),
        ("```\na\n```\n```text\nb\n```", "b\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("  ```Python3 title=x\n  a\n  ```  ", "a\n"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n"),
        ("```python\na = '```'\n```", "a = '```'\n"),
        ("```python\nnever closed", ""),
        ("print(3)", ""),
        ("<think>\n```python\na\n```\n</think>\nI give up.", ""),
        ("a thought\n```python\na\n```\n</think>\n```python\nb\n```", "b\n"),
        ("<think>\n```python\na\n```\nand then", ""),
        ("", ""),
    ],
)
def test_the_program_in_a_response(response: str, program: str) -> None:
    assert program_in(response) == program


@pytest.mark.parametrize("indent", ["", "   ", "\t"])
def test_an_indented_fence_indents_its_program(indent: str) -> None:
    program = "for i in range(2):\n    if i:\n        print(i)\n"
    lines = ["```python", *program.splitlines(), "```"]
    response = "1. So:\n\n" + "".join(f"{indent}{line}\n" for line in lines)
    assert program_in(response) == program
    compile(program_in(response), "program", "exec")
