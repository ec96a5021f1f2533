"""A process that waits is late, one that computes is not, however slow the machine is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mugrpo_megatron.rewards import activity
from mugrpo_megatron.rewards.activity import Overtime, cpu_seconds, is_ready

pytestmark = pytest.mark.process

SPINS = "print(flush=True)\nwhile True: pass"
WAITS = "print(flush=True)\ninput()"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose child, of which nobody here knows, executes the text."""
    command = [sys.executable, "-c", PARENT, request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("child", [SPINS], indirect=True)
def test_one_that_computes_has_its_limit_again_in_cpu_seconds(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "MOST_TIMES", 1e9)
    generous, strict = Overtime(child.pid, 1e9), Overtime(child.pid, 0.2)
    while not strict.is_over():
        assert not generous.is_over()
    assert cpu_seconds(child.pid) >= 0.2
    assert is_ready(child.pid)
    assert not generous.is_over()


@pytest.mark.parametrize("child", [SPINS], indirect=True)
def test_one_that_is_stopped_is_late(child: subprocess.Popen[bytes]) -> None:
    overtime = Overtime(child.pid, 1e9)
    os.killpg(child.pid, signal.SIGSTOP)
    while not overtime.is_over():
        pass
    assert not is_ready(child.pid)


@pytest.mark.parametrize("child", [WAITS], indirect=True)
def test_one_that_waits_is_late(child: subprocess.Popen[bytes]) -> None:
    overtime = Overtime(child.pid, 1e9)
    while not overtime.is_over():
        pass
    assert not is_ready(child.pid)


@pytest.mark.parametrize("child", [SPINS], indirect=True)
def test_no_process_is_in_overtime_for_ever(child: subprocess.Popen[bytes]) -> None:
    assert Overtime(child.pid, 0.0).is_over()


def test_a_process_that_is_gone_is_late() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert Overtime(process.pid, 1e9).is_over()
