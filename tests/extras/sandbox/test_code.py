"""`reward.function = "code"` from a response to a reward, through the verifier's workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mugrpo_megatron.checks.toolchain import State
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sandbox import kernel, programs
from mugrpo_megatron.extras.sandbox.code import Grader, failure, grade
from mugrpo_megatron.extras.sandbox.jail_check import check_jail, jail, weakness
from mugrpo_megatron.extras.sandbox.limits import Limits
from mugrpo_megatron.extras.sandbox.programs import OUT_OF_TIME, run_program
from mugrpo_megatron.extras.sandbox.row_tests import AssertTest, ProgramTest
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.activity import Overtime
from mugrpo_megatron.rewards.pool import Verifier
from tests.extras.sandbox.code_problems import PROBLEMS
from tests.forked import fork


def fenced(program: str) -> str:
    return f"It is done like this:\n```python\n{program}\n```"


def section(**settings: object) -> RewardSection:
    given = {"function": "code", "workers": 2, "timeout_s": 120.0, **settings}
    return RewardSection.model_validate(given)


@pytest.mark.process
@pytest.mark.parametrize("mode", ["namespaces", pytest.param("limits", marks=pytest.mark.night)])
def test_right_programs_pass_and_wrong_ones_do_not(mode: str) -> None:
    cases = [(name, problem.row, problem.right, 1.0) for name, problem in PROBLEMS.items()]
    cases += [(name, problem.row, wrong, 0.0) for name, problem in PROBLEMS.items() for wrong in problem.wrong]
    with Verifier(section(code={"sandbox": mode, "test_s": 10.0})) as verifier:
        programs = [fenced(program) for _, _, program, _ in cases]
        scores = verifier.submit(programs, [""] * len(cases), rows=[row for _, row, _, _ in cases]).result()
    wrong = [
        (name, program, score.why)
        for (name, _, program, reward), score in zip(cases, scores, strict=True)
        if score.reward != reward
    ]
    assert wrong == []


@pytest.mark.process
def test_all_or_share() -> None:
    row = {"tests": {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "0"]}}
    responses = [fenced("print(input())"), fenced("print(0)"), "no program", fenced("print(1)")]
    rewards = {}
    for kind in ("all", "share"):
        with Verifier(section(code={"reward": kind})) as verifier:
            rewards[kind] = verifier.submit(responses, [""] * 4, rows=[row] * 4).result()
    assert [score.reward for score in rewards["all"]] == [0.0, 0.0, 0.0, 0.0]
    assert [score.reward for score in rewards["share"]] == [0.75, 0.25, 0.0, 0.25]
    assert rewards["all"][0].why == "test 4 of 4: wrong output"
    assert rewards["share"][0].why == "passed 3 of 4; test 4 of 4: wrong output"
    assert rewards["share"][2].why == "no program found"
    with Verifier(section(code={"tests": 2})) as verifier:  # the first and the third
        assert [s.reward for s in verifier.submit(responses, [""] * 4, rows=[row] * 4).result()] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.process
def test_rows_that_are_too_large_together_score_as_alone() -> None:
    """Each fits a worker; sixteen of them are more than its memory."""
    rows = [{"tests": {"inputs": [str(n)], "outputs": [str(n)]}, "unread": "x" * (8 << 20)} for n in range(16)]
    with Verifier(section(workers=1, worker_memory_mb=256, code={"test_s": 10.0})) as verifier:
        scores = verifier.submit([fenced("print(input())")] * 16, [""] * 16, rows=rows).result()
    assert [(score.reward, score.why) for score in scores] == [(1.0, "passed")] * 16


@pytest.mark.process
def test_reasons_say_what_went_wrong() -> None:
    row = {"tests": {"inputs": ["5"], "outputs": ["5"]}}
    programs = {
        "print(int(input()) + x)": "exit code 1: NameError: name 'x' is not defined",
        "print(": "exit code 1: SyntaxError: '(' was never closed",
        "while True: pass": "ran out of time|ended by SIGKILL",
        "while True: print(5)": "wrote too much",
        "import os; os.abort()": "ended by SIG",
        "x = 'a' * 10 ** 10": "exit code 1: MemoryError",
    }
    with Verifier(section(code={"test_s": 2.0})) as verifier:
        scores = verifier.submit([fenced(text) for text in programs], [""] * 6, rows=[row] * 6).result()
    for score, why in zip(scores, programs.values(), strict=True):
        assert any(score.why.startswith(f"test 1 of 1: {reason}") for reason in why.split("|")), score.why


@pytest.mark.process
def test_a_row_without_tests_ends_the_run() -> None:
    with (
        Verifier(section()) as verifier,
        pytest.raises(UserError, match=r"'code' failed .* has no tests.*fix the data"),
    ):
        verifier.submit([fenced("print(3)")], ["42"], rows=[{}]).result()


@pytest.mark.process
def test_a_slow_machine_ends_no_program_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this one a hundredth of a second by the clock is too short for any program."""
    monkeypatch.setattr(programs, "Overtime", lambda process, _: Overtime(process, 3600.0))
    limits = Limits(mode="limits", test_s=600.0, wall_s=0.01)
    assert failure("print(sum(range(3 * 10**6)))", ProgramTest("", "4499998500000"), limits) == ""
    sleeps = "import time; time.sleep(10**6)"
    assert failure(sleeps, ProgramTest("", ""), limits) == OUT_OF_TIME


@pytest.mark.process
def test_a_tests_time_is_part_of_the_responses() -> None:
    """A program that sleeps has 2 s by the clock, and its 50 tests have 3 together."""
    options = Grader(Limits(test_s=600.0, wall_s=2.0), True, 0, 4.0)
    row = {"tests": {"inputs": ["5"] * 50, "outputs": ["5"] * 50}}
    reward, why = grade(fenced("import time; time.sleep(10**6)"), "", row, options)
    assert (reward, why) == (0.0, f"passed 0 of 50; test 1 of 50: {OUT_OF_TIME}")


@pytest.mark.process
def test_a_machine_without_namespaces_is_told_the_way_out() -> None:
    process = fork(_without_namespaces)
    process.join()
    assert process.exitcode == 0


def _without_namespaces() -> None:
    """As in a container whose own filter refuses unshare."""
    kernel.unshare = _refused
    with pytest.raises(UserError, match=r"could not be made: .*unshare.*code.sandbox = \"limits\""):
        check_jail(Limits())
    check_jail(Limits(mode="limits"))


def _refused(flags: int) -> None:
    raise PermissionError(1, "Operation not permitted", "unshare")


def test_the_weaker_mode_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weakness("namespaces") == ""
    for version, told in ((7, "only the filter of system calls and Landlock"), (0, "they can read what this user can")):
        monkeypatch.setattr(kernel, "landlock_version", lambda found=version: found)
        assert told in weakness("limits")


@pytest.mark.process
def test_without_landlock_nothing_is_written_and_asserts_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    limits = Limits(mode="limits", test_s=10.0)
    check_jail(limits)
    assert failure("print(open('/etc/passwd').read()[:0] + 'read')", ProgramTest("", "read"), limits) == ""
    path = str(tmp_path / "file")
    assert "File too large" in failure(f"open({path!r}, 'wb', 0).write(b'x')", ProgramTest("", ""), limits)
    assert Path(path).read_bytes() == b""
    with pytest.raises(UserError, match="only on a kernel with Landlock"):
        failure("def f(): return 1", AssertTest("assert f() == 1"), limits)


BOMB = """
import os, threading, time
threading.stack_size(65536)
count = 1
try:
    while True:
        threading.Thread(target=time.sleep, args=(999,), daemon=True).start()
        count += 1
except Exception:
    os.write(1, str(count).encode())
os._exit(0)
"""


@pytest.mark.process
def test_a_program_has_so_many_threads_and_no_more() -> None:
    """As root too: its user id is no other process's. It was 767 of them."""
    limits = Limits(wall_s=600.0)
    assert run_program(BOMB, "", limits).output == str(limits.threads).encode()


@pytest.mark.parametrize(
    ("works", "state", "found", "says"),
    [
        ({"namespaces", "limits"}, "ok", "namespaces", ""),
        ({"limits"}, "broken", "limits alone", 'reward.code.sandbox = "limits"'),
        (set(), "absent", "works in no mode", "docs/rewards.md"),
    ],
)
def test_programs_are_held_as_well_as_this_machine_can(
    works: set[str], state: State, found: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(limits: Limits) -> None:
        if limits.mode not in works:
            raise UserError("refused")

    monkeypatch.setattr("mugrpo_megatron.extras.sandbox.jail_check.check_jail", check)
    finding = jail()
    assert (finding.state, finding.needed) == (state, False)
    assert found in finding.detail
    assert says in finding.remedy
