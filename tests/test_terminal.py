"""What a long command prints when nothing reads it any more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mugrpo_megatron.terminal import TolerantStream, ignore_broken_pipe
from tests.patience import PATIENCE_S

PRINTS = """
import sys
from rich.console import Console
from mugrpo_megatron.terminal import ignore_broken_pipe
with ignore_broken_pipe():
    sys.stdin.read()
    for _ in range(3):
        print("line", flush=True)
        Console().print("line")
        print("error", file=sys.stderr)
sys.exit(7)
"""


def test_what_nothing_reads_is_lost_and_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread:
        stream = TolerantStream(unread)
        assert [stream.write("text"), stream.write("more")] == [4, 4]
        stream.flush()
        assert os.readlink(f"/proc/self/fd/{unread.fileno()}") == os.devnull
        assert stream.encoding == unread.encoding


def test_what_is_read_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with ignore_broken_pipe():
        print("out", flush=True)
        print("err", file=sys.stderr, flush=True)
    assert capfd.readouterr() == ("out\n", "err\n")
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.process
def test_a_command_goes_on_and_keeps_its_exit_code() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for stream in (process.stdout, process.stderr, process.stdin):
        assert stream
        stream.close()
    assert process.wait(PATIENCE_S) == 7
