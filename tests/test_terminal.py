"""What a long command prints when nothing reads it any more."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("ending.code = 0", 0, "handler"),
        ("ending.code = 2", 2, "handler"),
        ("sys.exit(5)", 5, "handler"),
        ("sys.exit('why')", 1, "why"),
        ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
    ],
)
def test_a_command_ends_after_its_handlers_and_without_its_modules(body: str, code: int, said: str) -> None:
    program = f"""
import atexit, sys
from mugrpo_megatron.terminal import ending_at_once
class Late:
    def __del__(self):
        print("taken apart", flush=True)
sys.late = Late()
with ending_at_once() as ending:
    atexit.register(print, "handler")
    {body}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert said in ended.stdout + ended.stderr
    assert "handler" in ended.stdout
    assert "taken apart" not in ended.stdout


@pytest.mark.process
def test_another_locale_reads_utf8(tmp_path: Path) -> None:
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    Path("größe.toml").write_text('[run]\ndir = "läufe"\n', encoding="utf-8")
    words = [sys.executable, "-m", "mugrpo_megatron", "train", "größe.toml", "--dry-run"]
    ended = subprocess.run(words, capture_output=True, env=environment, check=False)
    assert 'dir = "läufe"' in ended.stdout.decode("utf-8")
    assert b"Traceback" not in ended.stderr


def limit_files() -> None:
    """For a child alone: a limit that is lowered may not be raised again."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


@pytest.mark.process
@pytest.mark.parametrize("why", ["No space left on device", "File too large"])
def test_a_full_output_is_one_sentence(why: str, tmp_path: Path) -> None:
    full = Path("/dev/full") if why.startswith("No space") else tmp_path / "out"
    with full.open("wb") as stdout:
        words = [sys.executable, "-m", "mugrpo_megatron", "plan", "one_gpu/24gb.toml", "--gpu", "rtx4090"]
        limit = limit_files if full.name == "out" else None
        ended = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, check=False, preexec_fn=limit)
    assert ended.stderr.decode().startswith(f"mugrpo: the output cannot be written ({why}); send it elsewhere, or ")
    assert ended.stderr.count(b"\n") == 1
    assert ended.returncode == 2


@pytest.mark.process
def test_what_a_log_may_not_hold_is_lost_and_raises_nothing(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        limit_files()
        with (tmp_path / "log").open("w", encoding="utf-8") as log:
            stream = TolerantStream(log)
            written = stream.write("x" * 10_000)
            stream.flush()
            lost = os.readlink(f"/proc/self/fd/{log.fileno()}") == os.devnull
        os._exit(written == 10_000 and lost)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
