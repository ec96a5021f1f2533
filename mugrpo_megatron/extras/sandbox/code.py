r"""`reward.function = "code"`: runs a response's program against its row's tests, in jails without network and files.

The program sees the input of one test at a time. Expected outputs stay in the worker, and test code has a jail of its
own: see docs/rewards.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sandbox import kernel
from mugrpo_megatron.extras.sandbox.jail_check import check_jail, sees_files, weakness
from mugrpo_megatron.extras.sandbox.limits import Limits
from mugrpo_megatron.extras.sandbox.matching import same_output, same_value
from mugrpo_megatron.extras.sandbox.programs import call_function, check_asserts, run_program
from mugrpo_megatron.extras.sandbox.row_tests import AssertTest, FunctionTest, ProgramTest, Test, read_tests
from mugrpo_megatron.rewards.math.extract import after_thoughts

_FENCE = re.compile(
    r"^([ \t]*)(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)^[ \t]*\2[`~]*[ \t]*$", re.DOTALL | re.MULTILINE
)
_PYTHON = frozenset(("python", "python3", "py"))
MOST_CHARACTERS = 65_536
"""A longer program scores 0 without being run."""
_SPARE_S = 1.0
"""Kept of `reward.timeout_s`, so that the worker answers before it is killed."""


@dataclass(frozen=True, slots=True)
class Grader:
    """The reward function `code` with the recipe's `reward.code`, as the verifier's workers call it."""

    limits: Limits
    share: bool
    """The reward is the share of passed tests; else 1 when all pass, 0 otherwise."""
    most_tests: int
    """Only this many tests count, evenly spread over the row's; 0 takes all."""
    timeout_s: float
    """Seconds for all tests of a response."""
    note: str = ""
    """What the user should know of it at the start; "" where nothing."""

    def __call__(self, response: str, answer: object, row: Mapping[str, Any]) -> dict[str, Any]:
        """Raises what `grade` raises."""
        reward, why = grade(response, answer, row, self)
        return {"score": reward, "why": why}


def grader(options: Mapping[str, Any]) -> Grader:
    """The function that judges by `options`: those of `reward.code`, `memory_mb` and `timeout_s`.

    Raises UserError where this machine cannot hold programs so.
    """
    test_s = float(options["test_s"])
    limits = Limits(options["sandbox"], test_s, int(options["memory_mb"]), wall_s=2 * test_s + 1)
    check_jail(limits)
    if sees_files(limits.mode):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # other processes of this user cannot open this one's memory
    share = options["reward"] == "share"
    return Grader(limits, share, int(options["tests"]), float(options["timeout_s"]), weakness(limits.mode))


def program_in(response: str) -> str:
    """The program in a response: its last fenced block of Python, else its last fenced block; "" without one.

    As in Markdown, lines lose as much indentation as their fence has: in a list it is indented, and so is the program.
    A draft in a thought is not the program, as a thought is no answer to `math`.
    """
    fences = _FENCE.finditer(after_thoughts(response))
    blocks = [(match[3].lower(), _outdented(match[4], len(match[1]))) for match in fences]
    python = [text for language, text in blocks if language in _PYTHON]
    return (python or [text for _, text in blocks] or [""])[-1]


def _outdented(text: str, indent: int) -> str:
    return re.sub(rf"^[ \t]{{1,{indent}}}", "", text, flags=re.MULTILINE) if indent else text


def grade(response: str, gold: object, row: Mapping[str, Any], options: Grader) -> tuple[float, str]:
    """(reward, reason) of a response.

    Raises ValueError when the row has no usable tests, UserError when no jail can be made.
    """
    tests = read_tests(gold, row)
    if options.most_tests and len(tests) > options.most_tests:
        tests = [tests[place * len(tests) // options.most_tests] for place in range(options.most_tests)]
    program = program_in(response)
    if not program.strip():
        return 0.0, "no program found"
    if len(program) > MOST_CHARACTERS:
        return 0.0, f"program longer than {MOST_CHARACTERS} characters"
    deadline = time.monotonic() + max(options.timeout_s - _SPARE_S, options.timeout_s / 2)
    passed, reason = 0, ""
    for place, test in enumerate(tests):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            reason = reason or f"test {place + 1} of {len(tests)}: no time left"
            break
        limits = replace(options.limits, wall_s=min(options.limits.wall_s, remaining))
        if why := failure(program, test, limits):
            reason = reason or f"test {place + 1} of {len(tests)}: {why}"
            if not options.share:
                return 0.0, reason
        else:
            passed += 1
    if passed == len(tests):
        return 1.0, "passed"
    return passed / len(tests) if options.share else 0.0, f"passed {passed} of {len(tests)}; {reason}"


def failure(program: str, test: Test, limits: Limits) -> str:
    """Why the program fails the test; "" when it passes."""
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
                raise UserError("test code can be read by programs here: asserts need namespaces, or Landlock")
            outcome = check_asserts(program, test, limits)
            return outcome.why_failed() or ("" if outcome.answer == b"passed" else "the tests ended early")
