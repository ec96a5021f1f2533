"""run_scripts/cluster/launch.py: how long ranks get to stop, how it exits, and what it listens on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException, SubprocessContext

from run_scripts.cluster import launch
from run_scripts.cluster.launch import exit_code, patient
from tests.patience import PATIENCE_S
from tests.torch211 import python_files

LAUNCH = Path(__file__).parents[2] / "run_scripts/cluster/launch.py"
RANK = Path(__file__).with_name("stopping_rank.py")
WITH_OVERLAY = """
import runpy, sys
import torch.distributed
assert "torch.distributed.elastic" not in sys.modules
torch.distributed.__path__.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script with the torchrun of another torch, whose files lie in the folder of the first argument."""


def start(grace: int, *rank: str, before: Sequence[str] = (), nohup: bool = False) -> subprocess.Popen[str]:
    """Two ranks of RANK under launch.py, or under what `before` makes of it; however the suite was started."""
    options = ["--nproc-per-node", "2", "--rdzv-backend", "loopback", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*before, str(LAUNCH), str(grace), *options, "--no-python", sys.executable, str(RANK), *rank]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}

    def usual() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=usual,
    )


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    """The next line of output that starts with `word`."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith(word):
            return line.strip()
    raise AssertionError(f"no line {word!r}: {process.communicate()[1]}")


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    printed, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, printed, errors


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[signal.Signals, int]]:
    """What `PContext._close` is called with: signal, seconds until SIGKILL."""
    called: list[tuple[signal.Signals, int]] = []

    def close(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
        called.append((death_sig, timeout))

    monkeypatch.setattr(SubprocessContext, "_close", close)
    return called


@pytest.fixture
def ranks(tmp_path: Path) -> SubprocessContext:
    context = SubprocessContext.__new__(SubprocessContext)
    context.subprocess_handlers, context._tail_logs = {}, []
    context.filtered_stdout = context.filtered_stderr = None
    return context


def test_every_way_in_which_torchrun_ends_its_ranks_gives_them_the_time(
    closing: list[tuple[signal.Signals, int]], ranks: SubprocessContext
) -> None:
    before = PContext.close
    with patient(600):
        ranks.close()  # another rank failed
        ranks.close(signal.SIGTERM)  # a signal, torch 2.11
        ranks.close(signal.SIGTERM, 30)  # a signal, torch 2.13
    assert closing == [(signal.SIGTERM, 600)] * 3
    assert PContext.close is before


@pytest.mark.parametrize(
    ("again", "then"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGKILL)], ids=lambda s: s.name
)
def test_a_second_signal_ends_the_wait_only_if_it_is_ctrl_c(
    again: signal.Signals, then: signal.Signals, ranks: SubprocessContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[signal.Signals] = []

    def close(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
        called.append(death_sig)
        if len(called) == 1:
            raise SignalException("once more", sigval=again)

    monkeypatch.setattr(SubprocessContext, "_close", close)
    with patient(600):
        ranks.close(signal.SIGTERM)
    assert called == [signal.SIGTERM, then]


@pytest.mark.parametrize(
    ("stopped_by", "codes", "expected"),
    [
        (signal.SIGINT, [130, 130], 130),
        (signal.SIGINT, [0, 130], 130),
        (signal.SIGINT, [130, -signal.SIGKILL], 130),  # Ctrl-C twice
        (signal.SIGINT, [], 130),
        (signal.SIGINT, [130, 3], 1),
        (signal.SIGTERM, [0, 0], 0),
        (signal.SIGTERM, [0, 130], 1),
        (signal.SIGTERM, [], 1),
    ],
)
def test_ctrl_c_gives_130_and_another_signal_0_where_every_rank_saved(
    stopped_by: signal.Signals, codes: list[int], expected: int
) -> None:
    assert exit_code(stopped_by, codes) == expected


@pytest.mark.process
def test_under_nohup_ranks_stop_when_asked_and_not_when_the_terminal_is_lost() -> None:
    """And only loopback listens."""
    process = start(60, "stops", "0", nohup=True)
    assert wait_for(process, "listening") == "listening 127.0.0.1"
    for one in (process, *psutil.Process(process.pid).children()):
        one.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    code, printed, errors = end(process)
    assert (code, printed.count("saved")) == (0, 2), errors
    assert "stopped by SIGTERM; ranks: exit code 0, exit code 0" in errors
    assert "Traceback" not in errors


def test_a_killed_rank_is_said_to_have_run_out_of_memory() -> None:
    assert "memory ran out" in launch.reason(-signal.SIGKILL)
    assert launch.reason(3) == launch.reason(-signal.SIGSEGV) == "its log says why"


@pytest.mark.process
@pytest.mark.night
def test_ranks_that_do_not_stop_are_killed_after_the_grace() -> None:
    process = start(1, "survives", "0")
    wait_for(process, "listening")
    process.send_signal(signal.SIGTERM)
    code, printed, errors = end(process)
    assert (code, printed.count("saved")) == (1, 0)
    assert "ranks: SIGKILL, SIGKILL" in errors


@pytest.mark.process
@pytest.mark.night
def test_a_failed_rank_gives_its_code_to_the_command_and_its_peers_time() -> None:
    process = start(60, "fails", "0")
    code, printed, errors = end(process)
    assert (code, printed.count("saved")) == (3, 1)
    assert "rank 1 failed first, with exit code 3" in errors
    assert "Traceback" not in errors


@pytest.mark.process
@pytest.mark.night
@pytest.mark.parametrize("mode", ["stops", "fails"])
@pytest.mark.parametrize("torchrun", ["installed", "2.11"])
def test_saving_may_take_longer_than_torchruns_30_seconds(
    torchrun: str, mode: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    before: list[str] = []
    if torchrun == "2.11":
        found = python_files(pytestconfig.cache.mkdir("torch211")) / "torch" / "distributed"
        for name in ("elastic", "launcher"):
            shutil.copytree(found / name, tmp_path / name)
        shutil.copy(found / "run.py", tmp_path)
        before = ["-c", WITH_OVERLAY, str(tmp_path)]
    process = start(120, mode, "33", before=before)
    wait_for(process, "listening")
    process.send_signal(signal.SIGTERM) if mode == "stops" else None
    code, printed, errors = end(process)
    assert (code, printed.count("saved")) == ((0, 2) if mode == "stops" else (3, 1)), errors
