"""No cheat is paid, every right program is; a row without usable tests pays nobody."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mugrpo_megatron.extras.sandbox.code import Grader, grade
from mugrpo_megatron.extras.sandbox.limits import Limits
from mugrpo_megatron.extras.sandbox.row_tests import read_tests
from tests.extras.sandbox.cheats import ADD, CHEATED, REFUSED, Cheated

pytestmark = pytest.mark.process

OPTIONS = Grader(Limits(test_s=10.0, memory_mb=256, wall_s=60.0), False, 0, 120.0)
RUN = (
    "an assert that is never reached",
    "asserts behind a false condition",
    "asserts behind TYPE_CHECKING",
    "a skipped test",
)
"""Those of REFUSED that only their execution shows."""


def reward(program: str, cheated: Cheated) -> tuple[float, str]:
    return grade(f"```python\n{program}\n```", "", cheated.row, OPTIONS)


FEW = ("all over a generator", "isclose without an import", "a TestCase that expects an exception")
"""What runs by day; a program costs two interpreters."""
NIGHT = [pytest.param(name, marks=() if name in FEW else pytest.mark.night) for name in CHEATED]


@pytest.mark.parametrize("name", NIGHT)
def test_right_programs_alone_are_paid(name: str) -> None:
    case = CHEATED[name]
    assert reward(case.right, case) == (1.0, "passed")
    with ThreadPoolExecutor(2) as pool:
        paid = list(pool.map(lambda program: reward(program, case)[0], case.cheats))
    assert [program for program, is_paid in zip(case.cheats, paid, strict=True) if is_paid] == []


@pytest.mark.parametrize("name", REFUSED)
def test_rows_without_usable_tests_pay_nobody(name: str) -> None:
    row = REFUSED[name]
    if name not in RUN:
        with pytest.raises(ValueError, match=r"test|solution"):
            read_tests(row.get("answer", ""), row)
        return
    assert grade(f"```python\n{ADD}\n```", "", row, OPTIONS)[0] == 0.0
