r"""`reward.function = "code"`: runs a response's program against its row's tests, in jails without network and files.

The program sees the input of one test at a time. Expected outputs stay in the worker, and test code has a jail of its
own: see docs/rewards.md.

What the program prints is compared line by line and word by word, so the amount of white space does not count. Words
are equal if they are the same text or the same number: an expected integer must be met exactly; if the expected
number has a decimal point or an exponent, `close` decides. Values that a function returns are compared by their
content; a list equals a tuple.
"""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sandbox import kernel
from mugrpo_megatron.extras.sandbox.jail_check import check_jail, sees_files, weakness
from mugrpo_megatron.extras.sandbox.limits import Limits
from mugrpo_megatron.extras.sandbox.programs import OUT_OF_TIME, call_function, check_asserts, run_program
from mugrpo_megatron.extras.sandbox.row_tests import AssertTest, FunctionTest, ProgramTest, Test, read_tests
from mugrpo_megatron.extras.sandbox.value_codec import unpack
from mugrpo_megatron.rewards.activity import LOOK_S
from mugrpo_megatron.rewards.math.thoughts import after_thoughts

_FENCE = re.compile(
    r"^([ \t]*)(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)^[ \t]*\2[`~]*[ \t]*$", re.DOTALL | re.MULTILINE
)
_PYTHON = frozenset(("python", "python3", "py"))
MOST_CHARACTERS = 65_536
"""A longer program scores 0 without being run."""
_SPARE_S = 1.0
"""Seconds of `reward.timeout_s` that the tests do not get, so that the worker answers before it is killed."""
TOLERANCE = "1e-6"
"""Tolerance relative to the expected number, as most problem statements allow; for small numbers see `close`."""
_MOST_BITS = 1100
"""Most bits of an integer that is compared with a float; the largest float has 1,024."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


@dataclass(frozen=True, slots=True)
class Grader:
    """The reward function `code` with the recipe's `reward.code`, as the verifier's workers call it."""

    limits: Limits
    share: bool
    """Whether the reward is the share of passed tests; if not, it is 1 when all pass and 0 otherwise."""
    most_tests: int
    """Number of tests that count, evenly spread over the row's; 0 takes all."""
    timeout_s: float
    """CPU seconds for all tests of a response. A test whose time by the clock runs out, such as one that sleeps, counts
    with that time too."""
    note: str = ""
    """Warning for the user at the start; may be empty."""

    def __call__(self, response: str, answer: object, row: Mapping[str, Any]) -> dict[str, Any]:
        """Score a response; raises what `grade` raises."""
        reward, why = grade(response, answer, row, self)
        return {"score": reward, "why": why}


def grader(options: Mapping[str, Any]) -> Grader:
    """The reward function that runs a response's program. `options` has the keys of `[reward.code]`, and besides them
    `memory_mb` and `timeout_s`.

    Raises UserError if this machine cannot run programs in the sandbox that `options["sandbox"]` names.
    """
    test_s = float(options["test_s"])
    limits = Limits(options["sandbox"], test_s, int(options["memory_mb"]), wall_s=2 * test_s + 1)
    check_jail(limits)
    if sees_files(limits.mode):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # else a program, which has the same user, could read this memory
    share = options["reward"] == "share"
    return Grader(limits, share, int(options["tests"]), float(options["timeout_s"]), weakness(limits.mode))


def program_in(response: str) -> str:
    """The program in a response: its last fenced block of Python, else its last fenced block; "" without one.

    As in Markdown, the lines of a block lose as much indentation as its fence has, since a block in a list is indented.
    Blocks in the model's reasoning, such as <think> ... </think>, are drafts and do not count.
    """
    fences = _FENCE.finditer(after_thoughts(response))
    blocks = [(match[3].lower(), _outdented(match[4], len(match[1]))) for match in fences]
    python = [text for language, text in blocks if language in _PYTHON]
    return (python or [text for _, text in blocks] or [""])[-1]


def _outdented(text: str, indent: int) -> str:
    return re.sub(rf"^[ \t]{{1,{indent}}}", "", text, flags=re.MULTILINE) if indent else text


def grade(response: str, gold: object, row: Mapping[str, Any], options: Grader) -> tuple[float, str]:
    """Run a response's program on the row's tests; returns (reward, reason).

    Raises ValueError when the row has no usable tests, and UserError when no jail can be made, or when the tests are
    asserts and the sandbox would let programs read them.
    """
    tests = read_tests(gold, row)
    if options.most_tests and len(tests) > options.most_tests:
        tests = [tests[index * len(tests) // options.most_tests] for index in range(options.most_tests)]
    program = program_in(response)
    if not program.strip():
        return 0.0, "no program found"
    if len(program) > MOST_CHARACTERS:
        return 0.0, f"program longer than {MOST_CHARACTERS} characters"
    remaining = max(options.timeout_s - _SPARE_S, options.timeout_s / 2)
    passed, reason = 0, ""
    for index, test in enumerate(tests):
        if remaining <= 0:
            reason = reason or f"test {index + 1} of {len(tests)}: no time left"
            break
        limits = replace(options.limits, wall_s=min(options.limits.wall_s, max(remaining - LOOK_S, LOOK_S / 2)))
        before = _cpu_seconds()
        why = failure(program, test, limits)
        remaining -= _cpu_seconds() - before + (limits.wall_s + LOOK_S if why == OUT_OF_TIME else 0.0)
        if why:
            reason = reason or f"test {index + 1} of {len(tests)}: {why}"
            if not options.share:
                return 0.0, reason
        else:
            passed += 1
    if passed == len(tests):
        return 1.0, "passed"
    return passed / len(tests) if options.share else 0.0, f"passed {passed} of {len(tests)}; {reason}"


def _cpu_seconds() -> float:
    """CPU seconds of all programs that this process has run."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def failure(program: str, test: Test, limits: Limits) -> str:
    """Reason why the program fails the test; empty when it passes."""
    match test:
        case ProgramTest(stdin, expected):
            outcome = run_program(program, stdin, limits)
            return outcome.why_failed() or ("" if same_output(outcome.output, expected) else "wrong output")
        case FunctionTest(name, arguments, expected_values):
            outcome = call_function(program, name, arguments, limits)
            equal, why = same_value(outcome.answer, expected_values)
            return outcome.why_failed() or ("" if equal else why)
        case AssertTest():
            if sees_files(limits.mode):
                raise UserError(
                    'programs could read the test code of asserts: reward.code.sandbox = "limits" hides it only on a '
                    'kernel with Landlock; set the key to "namespaces", or leave out rows whose tests are asserts'
                )
            outcome = check_asserts(program, test, limits)
            return outcome.why_failed() or ("" if outcome.answer == b"passed" else "the tests ended early")


# ------------------------------------------------------------ comparing


def same_output(written: bytes, expected: str) -> bool:
    """Whether a program's stdout is the expected text."""
    lines, others = written.decode("utf-8", "replace").strip().splitlines(), expected.strip().splitlines()
    return len(lines) == len(others) and all(map(_same_line, lines, others))


def _same_line(line: str, expected: str) -> bool:
    words, others = line.split(), expected.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if _INTEGER.fullmatch(expected):
        return _INTEGER.fullmatch(word) is not None and int(word) == int(expected)
    if len(expected) > 400 or len(word) > 400 or not _NUMBER.fullmatch(expected) or not _NUMBER.fullmatch(word):
        return False
    return close(Decimal(word), Decimal(expected))


def same_value(answers: bytes, expected: Sequence[Any]) -> tuple[bool, str]:
    """(whether the program's result equals one of `expected`, the reason if it does not).

    `answers` are the lines of JSON that `program_server` wrote; the second one has the result.
    """
    lines = answers.splitlines()
    if len(lines) < 2:
        return False, "returned nothing: the program ended first"
    try:
        answer = json.loads(lines[1])
        if "error" in answer:
            first = json.loads(lines[0])
            problem = first if "error" in first else answer
            return False, f"{problem['error']}: {str(problem['text'])[:160]}"
        result = unpack(answer["value"], _refused)["result"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return False, "returned a value that is not plain data"
    return any(same(result, value) for value in expected), "differs from the expected result"


def same(result: Any, expected: Any) -> bool:
    """Whether a result equals the expected value. A list equals a tuple. Where a float is expected, `close` decides.

    Iterative, because a program chooses the depth of what it returns.
    """
    pairs = [(result, expected)]
    while pairs:
        left, right = pairs.pop()
        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            if len(left) != len(right):
                return False
            pairs += zip(left, right, strict=True)
        elif isinstance(left, dict) and isinstance(right, dict):
            texts = {str(key): value for key, value in left.items()}  # in JSON every key is text
            if texts.keys() != right.keys() or len(texts) != len(left):
                return False
            pairs += [(texts[key], right[key]) for key in right]
        elif isinstance(right, float) and type(left) in (int, float):
            if (type(left) is int and left.bit_length() > _MOST_BITS) or not close(
                Decimal(repr(left)), Decimal(repr(right))
            ):
                return False
        elif (type(left) is bool) != (type(right) is bool) or left != right:
            return False
    return True


def close(value: Decimal, expected: Decimal) -> bool:
    """Whether a number differs little enough from the expected one.

    The difference may be TOLERANCE times the expected number, or half a unit of the expected number's last written
    digit (but at most TOLERANCE). So 0 is wrong where 0.0000001 is expected, and 1e-12 is right where 0.0 is expected.
    """
    if value == expected:
        return True
    if not (value.is_finite() and expected.is_finite()):
        return False
    exponent = int(expected.as_tuple().exponent)
    shown = min(Decimal(TOLERANCE), Decimal((0, (5,), exponent - 1)))
    return abs(value - expected) <= max(Decimal(TOLERANCE) * abs(expected), shown)


def _refused(_handle: dict[str, Any]) -> Any:
    raise TypeError
