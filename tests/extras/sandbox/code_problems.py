"""Small programming problems of LiveCodeBench's shape, with a right program and wrong ones for each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CodeProblem:
    """The row's columns, a program that solves it, and programs that do not."""

    row: dict[str, Any]
    right: str
    wrong: tuple[str, ...] = field(default=())


def _stdin(*cases: tuple[str, str]) -> dict[str, Any]:
    tests = [{"input": given, "output": output, "testtype": "stdin"} for given, output in cases]
    return {"public_test_cases": json.dumps(tests[:1]), "private_test_cases": json.dumps(tests[1:])}


def _functional(name: str, *cases: tuple[str, str]) -> dict[str, Any]:
    tests = [{"input": given, "output": output, "testtype": "functional"} for given, output in cases]
    return {"public_test_cases": json.dumps(tests), "metadata": json.dumps({"func_name": name})}


PROBLEMS = {
    "the largest gap": CodeProblem(
        _stdin(("3\n1 9 4\n", "5\n"), ("2\n-3 -3\n", "0\n"), ("1\n7\n", "0\n")),
        "input()\na = sorted(map(int, input().split()))\nprint(max((y - x for x, y in zip(a, a[1:])), default=0))",
        ("input()\na = sorted(map(int, input().split()))\nprint(max(y - x for x, y in zip(a, a[1:])))", "print(5)"),
    ),
    "a mean": CodeProblem(
        _stdin(("1 2\n", "1.5\n"), ("1 1 2\n", "1.3333333333\n")),
        "a = list(map(float, input().split()))\nprint(f'{sum(a) / len(a):.7f}')",
        ("a = list(map(float, input().split()))\nprint(f'{sum(a) / len(a):.2f}')",),
    ),
    "a picture": CodeProblem(
        _stdin(("2\n", "*.\n.*\n"), ("3\n", "*..\n.*.\n..*\n")),
        "n = int(input())\nfor i in range(n):\n    print('.' * i + '*' + '.' * (n - 1 - i), end='  \\n')",
        ("n = int(input())\nprint(''.join('.' * i + '*' + '.' * (n - 1 - i) for i in range(n)))",),
    ),
    "deep recursion in a thread": CodeProblem(
        _stdin(("20000\n", "200010000\n")),
        (
            "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 26)\n"
            "def f(n):\n    return n + f(n - 1) if n else 0\n"
            "thread = threading.Thread(target=lambda: print(f(int(input()))))\nthread.start()\nthread.join()"
        ),
        ("def f(n):\n    return n + f(n - 1) if n else 0\nprint(f(int(input())))",),
    ),
    "reading to the end": CodeProblem(
        _stdin(("a b\nb c\n", "3\n"), ("", "0\n")),
        "import sys\nif __name__ == '__main__':\n    print(len(set(sys.stdin.read().split())))\n    exit()",
        ("print(len(set(input().split())))",),
    ),
    "much output": CodeProblem(
        _stdin(("30000\n", "\n".join(map(str, range(30000))))),
        "import sys\nsys.stdout.write('\\n'.join(map(str, range(int(input())))))",
        ("for i in range(int(input())):\n    print(i + 1)",),
    ),
    "two numbers": CodeProblem(
        _functional("twoSum", ("[2,7,11,15]\n9", "[0,1]"), ("[3,3]\n6", "[0,1]")),
        (
            "class Solution:\n    def twoSum(self, nums: list[int], target: int) -> list[int]:\n        seen = {}\n"
            "        for i, x in enumerate(nums):\n            if target - x in seen:\n"
            "                return seen[target - x], i\n"
            "            seen[x] = i"
        ),
        (
            "class Solution:\n    def twoSum(self, nums, target):\n        return [0, 1, 2]",
            "def two(a, b):\n    return [0, 1]",
        ),
    ),
    "text in and out": CodeProblem(
        _functional("flip", ('"abc"', '"cba"'), ('""', '""')),
        "print('loaded')\ndef flip(text):\n    print(text)\n    return text[::-1]",
        (
            "def flip(text):\n    print(text[::-1])",
            "class Solution:\n    pass",
            "def flip(text):\n    raise ValueError",
        ),
    ),
    "a result in a list": CodeProblem(
        {"input_output": json.dumps({"fn_name": "half", "inputs": [[3], [4.0]], "outputs": [[1.5], [2]]})},
        "def half(x):\n    return x / 2",
        ("def half(x):\n    return x // 2",),
    ),
    "asserts one by one": CodeProblem(
        {
            "test_setup_code": "from math import isclose",
            "test_list": ["assert isclose(area(1), 3.14159, rel_tol=1e-3)", "assert area(0) == 0"],
        },
        "import math\ndef area(r):\n    return math.pi * r * r",
        ("def isclose(*_, **__):\n    return True\ndef area(r):\n    return r", "def area(r):\n    return 3.14159"),
    ),
    "a list that is sorted in place": CodeProblem(
        {
            "test": (
                "def check(candidate):\n    a = [3, 1, 2]\n    assert candidate(a) is None\n    assert a == [1, 2, 3]"
            ),
            "entry_point": "order",
        },
        "def order(a):\n    a.sort()",
        ("def order(a):\n    return sorted(a)", "def order(a):\n    pass"),
    ),
    "a class": CodeProblem(
        {
            "test": (
                "from solution import Stack\n\ndef test_last_in_first_out():\n"
                "    s = Stack()\n    s.push(1)\n    s.push(2)\n"
                "    assert s.pop() == 2 and len(s) == 1\n"
                "    try:\n        Stack().pop()\n    except IndexError:\n        pass\n"
                "    else:\n        assert False"
            )
        },
        (
            "class Stack(object):\n    def __init__(self):\n        self.kept = []\n    def push(self, x):\n"
            "        self.kept.append(x)\n    def pop(self):\n        return self.kept.pop()\n"
            "    def __len__(self):\n        return len(self.kept)"
        ),
        (
            (
                "class Stack(list):\n    push = list.append\n"
                "    def pop(self):\n        return list.pop(self) if self else None"
            ),
            "class Always:\n    def __getattr__(self, _):\n        return lambda *_: self\n    def __eq__(self, _):\n"
            "        return True\nStack = Always",
        ),
    ),
    "code_contests' columns": CodeProblem(
        {
            "solution": "assert True  # a program is not a test",
            "public_tests": {"input": ["2\n"], "output": ["4\n"]},
            "private_tests": {"input": ["3\n"], "output": ["9\n"]},
        },
        "print(int(input()) ** 2)",
        ("print(int(input()) * 2)",),
    ),
}
