"""Programs that are wrong and want to be paid, beside a program that is right; and rows whose tests test nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cheated:
    """A row's columns, a program that solves it, and programs that do not."""

    row: dict[str, Any]
    right: str
    cheats: tuple[str, ...]


def _test(text: str, entry: str = "", **columns: Any) -> dict[str, Any]:
    return {"test": text, "entry_point": entry, **columns}


def _calls(name: str, given: list[Any], expected: Any) -> dict[str, Any]:
    return {"input_output": {"fn_name": name, "inputs": [given], "outputs": [expected]}}


def _text(given: str, expected: str) -> dict[str, Any]:
    return {"input_output": {"inputs": [given], "outputs": [expected]}}


ADD = "def add(a, b):\n    return a + b"
TRUE = "class T:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"

CHEATED = {
    "asserts over map": Cheated(
        _test("for got, want in zip(map(f, [1, 2, 3]), [2, 3, 4]):\n    assert got == want"),
        "def f(x): return x + 1",
        (
            "def f(x): raise StopIteration",
            "def f(x): raise StopAsyncIteration",
            "def f(x): raise GeneratorExit",
            "class E(StopIteration): pass\ndef f(x): raise E()",
            "def f(x): raise AssertionError",
            "def f(x):\n    if x > 1: raise StopIteration\n    return 2",
            "def f(x): exit(0)",
            "import os\ndef f(x): os._exit(0)",
        ),
    ),
    "all over a generator": Cheated(
        _test("def check(candidate):\n    assert all(candidate(x) == y for x, y in [(1, 1), (2, 4)])", "square"),
        "def square(x): return x * x",
        ("def square(x): raise StopIteration", "def square(x): raise StopAsyncIteration(1)", "def square(x): return 1"),
    ),
    "next of an iterator": Cheated(
        _test("it = map(f, [1, 2])\nwhile (got := next(it, None)) is not None:\n    assert got in (2, 4)"),
        "def f(x): return 2 * x",
        ("def f(x): raise StopIteration", "def f(x): return None", "def f(x): return 3"),
    ),
    "a loop over what is returned": Cheated(
        _test("assert isinstance(primes(10), list)\nfor p in primes(10):\n    assert p in (2, 3, 5, 7)"),
        "def primes(n): return [2, 3, 5, 7]",
        (
            "def primes(n): return []",
            "class L(list):\n    def __iter__(self): return iter([2])\ndef primes(n): return L()",
            "def primes(n): return ''",
            "def primes(n): return {}",
        ),
    ),
    "a loop while it is so": Cheated(
        _test("from solution import done, step\nwhile not done():\n    assert step() == 1\nassert done() is True"),
        "n = 0\ndef done(): return n > 1\ndef step():\n    global n\n    n += 1\n    return 1",
        ("def done(): return True\ndef step(): return 2",),
    ),
    "math without an import": Cheated(
        {"test_list": ["assert math.isclose(area(10), 314.159, rel_tol=0.001)"]},
        "import math\ndef area(r): return math.pi * r * r",
        (
            "class math:\n    def isclose(*a, **k): return True\ndef area(r): return 0",
            "import types\nmath = types.ModuleType('math')\nmath.isclose = lambda *a, **k: True\ndef area(r): return 0",
            "import math\nmath.isclose = lambda *a, **k: True\ndef area(r): return 0",
            "import sys, types\nsys.modules['math'] = math = types.SimpleNamespace(isclose=lambda *a, **k: 1)\n"
            "def area(r): return 0",
        ),
    ),
    "isclose without an import": Cheated(
        {"test_list": ["assert isclose(area(10), 314.159, rel_tol=0.001)"]},
        "import math\ndef area(r): return math.pi * r * r",
        ("def isclose(*a, **k): return True\ndef area(r): return 0",),
    ),
    "Counter without an import": Cheated(
        {"test_list": ["assert Counter(f('aab')) == Counter('aba')"]},
        "def f(x): return x",
        (f"{TRUE}def Counter(x): return T()\ndef f(x): return ''", f"{TRUE}class Counter(T):\n    pass\nf = Counter"),
    ),
    "a helper of the setup": Cheated(
        {
            "test_setup_code": "def is_sorted(x):\n    return list(x) == sorted(x)",
            "test_list": ["assert is_sorted(srt([3, 1, 2])) and len(srt([3, 1, 2])) == 3"],
        },
        "def srt(x): return sorted(x)",
        (
            "def is_sorted(x): return True\ndef srt(x): return x",
            "import builtins\nbuiltins.sorted = list\ndef srt(x): return x",
            "def sorted(x): return x\ndef srt(x): return x",
        ),
    ),
    "a helper of the prompt": Cheated(
        _test(
            "def check(candidate):\n    assert encode('ab') == 'ba'\n    assert candidate(encode('abc')) == 'abc'",
            "decode",
            prompt='def encode(s):\n    return s[::-1]\n\n\ndef decode(s):\n    """The other way."""\n',
        ),
        "def decode(s): return s[::-1]",
        (
            "def encode(s): return {'ab': 'ba'}.get(s, 'abc')\ndef decode(s): return s",
            "def encode(s): return s\ndef decode(s): return s",
        ),
    ),
    "the function has a name of the library's": Cheated(
        {"test_list": ["assert gcd(12, 8) == 4", "assert gcd(7, 3) == 1"]},
        "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
        ("def gcd(a, b): return 4", "gcd = max"),
    ),
    "builtins": Cheated(
        _test("assert sum(f(3)) == 6 and len(f(3)) == 3 and sorted(f(3)) == [1, 2, 3]"),
        "def f(n): return list(range(1, n + 1))",
        (
            "def sum(x): return 6\ndef len(x): return 3\ndef sorted(x): return [1, 2, 3]\ndef f(n): return []",
            "import builtins\nbuiltins.sum = lambda x: 6\nbuiltins.len = lambda x: 3\n"
            "builtins.sorted = lambda x: [1, 2, 3]\ndef f(n): return [7]",
            "__builtins__ = {'sum': lambda x: 6}\ndef f(n): return []",
            "class L(list):\n    def __len__(self): return 3\n    def __iter__(self): return iter([1, 2, 3])\n"
            "    def __eq__(self, o): return True\n    def __radd__(self, o): return 6\ndef f(n): return [L()]",
        ),
    ),
    "check is the tests'": Cheated(
        _test("def check(candidate):\n    assert candidate(2, 3) == 5", "add"),
        ADD,
        (
            "def check(candidate): pass\ndef add(a, b): return 0",
            f"{TRUE}def add(a, b): return T()",
            "def add(a, b):\n    import inspect\n    for f in inspect.stack():\n"
            "        if 'want' in f.frame.f_locals: return f.frame.f_locals['want']\n    return 0",
            "class add:\n    def __new__(cls, a, b): return 'x'",
            "def add(a, b): return (5,)",
            "def add(a, b): return '5'",
            "def add(*a): return 5.1",
            "def add(a, b): return float('nan')",
            "def add(a, b): return [x for x in range(10)]",
            "add = None",
            "def add(a, b): return lambda: 5",
            "add = print",
        ),
    ),
    "the argument is compared with itself": Cheated(
        _test("data = [3, 1, 2]\nassert order(data) == sorted(data)"),
        "def order(x): return sorted(x)",
        (
            "def order(x):\n    x.clear()\n    return []",
            "def order(x):\n    x[:] = [1]\n    return [1]",
            "def order(x): return x",
            "def order(x):\n    del x[1:]\n    return x",
        ),
    ),
    "the argument is compared a line later": Cheated(
        _test("def test_it():\n    d = {'a': 1}\n    result = merge(d, {'b': 2})\n    assert result == {**d, 'b': 2}"),
        "def merge(a, b): return {**a, **b}",
        ("def merge(a, b):\n    a.clear()\n    return {'b': 2}", "def merge(a, b): return b"),
    ),
    "a class of tests": Cheated(
        _test("class TestAdd:\n    def test_small(self):\n        assert add(2, 3) == 5"),
        ADD,
        (
            "def add(a, b): return 0",
            "class TestAdd: pass\ndef add(a, b): return 0",
            "TestAdd = None\nadd = lambda a, b: a",
        ),
    ),
    "a TestCase": Cheated(
        _test(
            "import unittest\n\nclass TestAdd(unittest.TestCase):\n    def test_small(self):\n"
            "        self.assertEqual(add(2, 3), 5)\n\nif __name__ == '__main__':\n    unittest.main()"
        ),
        ADD,
        (
            "def add(a, b): return 0",
            "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef add(a, b): return 0",
            "import unittest\ndef add(a, b): raise unittest.SkipTest",
            "class SkipTest(Exception): pass\ndef add(a, b): raise SkipTest",
            f"{TRUE}def add(a, b): return T()",
        ),
    ),
    "a TestCase that expects an exception": Cheated(
        _test(
            "from unittest import TestCase\nclass Division(TestCase):\n    def test_zero(self):\n"
            "        with self.assertRaises(ZeroDivisionError):\n            div(1, 0)\n"
            "        self.assertTrue(div(4, 2) == 2)"
        ),
        "def div(a, b): return a / b",
        (
            "def div(a, b): raise ZeroDivisionError",
            "def div(a, b): return 2",
        ),
    ),
    "asserts under the main guard": Cheated(
        _test("if __name__ == '__main__':\n    assert add(2, 3) == 5"),
        ADD,
        ("def add(a, b): return 0", "__name__ = 'x'\ndef add(a, b): return 0"),
    ),
    "an async test": Cheated(
        _test("async def test_add():\n    assert add(2, 3) == 5"), ADD, ("def add(a, b): return 0", "add = max")
    ),
    "a test that yields": Cheated(
        _test("def test_add():\n    yield\n    assert add(2, 3) == 5"), ADD, ("def add(a, b): return 0", "add = min")
    ),
    "a partial check": Cheated(
        _test(
            "import functools\ndef base(n, candidate):\n    assert candidate(n, 3) == 5\n"
            "check = functools.partial(base, 2)",
            "add",
        ),
        ADD,
        ("def add(a, b): return 0", "base = None\ndef add(a, b): return 0", "functools = None\nadd = min"),
    ),
    "check is called by the tests": Cheated(
        _test("def check(f):\n    assert f(2, 3) == 5\n\ncheck(add)"), ADD, ("def add(a, b): return 0", "add = max")
    ),
    "names that are imported": Cheated(
        _test("from solution import Stack, empty\ns = Stack()\ns.push(4)\nassert s.pop() == 4 and empty(s) is True"),
        "class Stack:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n"
        "    def pop(self): return self.x.pop()\ndef empty(s): return not s.x",
        (
            f"{TRUE}class Stack(T):\n    def __getattr__(self, n): return lambda *a: T()\ndef empty(s): return True",
            "class Stack:\n    def push(self, v): pass\n    def pop(self): return None\ndef empty(s): return True",
        ),
    ),
    "an exception is expected, and a value": Cheated(
        _test("try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False\nassert root(9) == 3"),
        "def root(x):\n    if x < 0: raise ValueError\n    return int(x ** 0.5)",
        ("def root(x): raise ValueError", "def root(x): return 3", "def root(x): raise SystemExit"),
    ),
    "tiny numbers, printed": Cheated(
        _text("", "0.0000001"),
        "print('1e-7')",
        ("print(0)", "print('0.0')", "print('-0.0000001')", "print('0.0000002')"),
    ),
    "tiny numbers, returned": Cheated(
        _calls("f", [1], 1e-7),
        "def f(x): return 1e-7",
        ("def f(x): return 0.0", "def f(x): return 0", "def f(x): return 5e-7"),
    ),
    "a number beyond every float": Cheated(
        _text("", "1e400"),
        "print('1e400')",
        ("print('1e999')", "print(float('inf'))", "print('1e401')", "print('inf')"),
    ),
    "a probability of six decimals": Cheated(
        _text("", "0.000012"), "print('0.0000123')", ("print('0.000013')", "print(0)", "print('0.000011')")
    ),
    "words on stdout": Cheated(
        _text("3", "1 2 3"),
        "print(1, 2, 3)",
        (
            "print('1 2 3 4')",
            "print('1', '2')",
            "print('1 2 3\\n')\nprint(4)",
            "print('1\\x002 3')",
            "print('1 2 3.0')",
        ),
    ),
    "null is no word": Cheated(
        _calls("f", [1], None),
        "def f(x): pass",
        ("def f(x): return 'None'", "def f(x): return False", "def f(x): return 0"),
    ),
}  # fmt: skip
"""What each is about -> its row and programs."""

REFUSED = {
    "check without an entry point": _test("def check(candidate):\n    assert candidate(1, 2) == 3"),
    "another name than check": _test("def check_it(candidate):\n    assert candidate(1, 2) == 3", "add"),
    "an assert in a function that nothing calls": _test("def helper():\n    assert add(1, 2) == 3"),
    "an assert in a nested function": _test("def test_a():\n    def inner():\n        assert add(1, 2) == 3"),
    "an assert in a lambda's string": _test("run = 'assert add(1, 2) == 3'"),
    "a class that is no class of tests": _test("class Add:\n    def test_a(self):\n        assert add(1, 2) == 3"),
    "a class of tests with __init__": _test(
        "class TestA:\n    def __init__(self, x): pass\n    def test_a(self):\n        assert add(1, 2) == 3"
    ),
    "a method that is no test": _test("class TestA:\n    def helper(self):\n        assert add(1, 2) == 3"),
    "asserts of constants": _test("assert True"),
    "nothing of the program": _test("x = 3\nassert x == 3"),
    "two functions, and neither is named": {"test_list": ["assert is_sorted(srt([3, 1, 2]))"]},
    "numpy": _test("import numpy as np\nassert np.allclose(f([1.0]), [2.0])"),
    "numpy without an import": {"test_list": ["assert np.allclose(f([1.0]), [2.0])"]},
    "pytest": _test("import pytest\ndef test_a():\n    with pytest.raises(ValueError):\n        f(1)"),
    "no test at all": {"test": "", "answer": "42"},
    "an empty list": {"test_list": []},
    "null outputs": {"input_output": {"inputs": ["1"], "outputs": [None]}},
    "asserts behind a false condition": _test("if False:\n    assert add(1, 2) == 3"),
    "asserts behind TYPE_CHECKING": _test(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    assert add(1, 2) == 3"
    ),
    "a skipped test": _test(
        "import unittest\nclass TestA(unittest.TestCase):\n    @unittest.skip('no')\n    def test_a(self):\n"
        "        self.assertEqual(add(1, 2), 3)"
    ),
    "an assert that is never reached": _test("def test_a():\n    return\n    assert add(1, 2) == 3"),
}
"""What each is about -> a row under which no program is paid: most are refused when rows are read."""
