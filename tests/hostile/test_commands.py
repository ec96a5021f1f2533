"""Outputs of `mugrpo score` and failures of any command: nothing is lost, and what is wrong is said."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.cli import COMMANDS
from mugrpo_megatron.commands import score
from mugrpo_megatron.files import durable
from tests.hostile.outcome import command, listing, refused

ROWS = '{"response": "1", "answer": 1}\n{"response": "2", "answer": 1}\n'


MADE: dict[str, Callable[[Path, Path], object]] = {
    "a hard link to the input": lambda folder, path: os.link(folder / "in.jsonl", path),
    "a symbolic link to the input": lambda folder, path: path.symlink_to("in.jsonl"),
    "a link to a link to the input": lambda folder, path: path.symlink_to("link.jsonl"),
    "a directory": lambda folder, path: path.mkdir(),
    "a link to a directory": lambda folder, path: path.symlink_to(folder),
    "a pipe": lambda folder, path: os.mkfifo(path),
    "a link to a device": lambda folder, path: path.symlink_to("/dev/null"),
    "a link to a full device": lambda folder, path: path.symlink_to("/dev/full"),
    "a loop of links": lambda folder, path: path.symlink_to("out.jsonl"),
}
"""What stands at the output's path, which is the second argument."""
NAMED = [
    "in.jsonl",
    "../FOLDER/in.jsonl",
    "in.jsonl/out.jsonl",
    "x" * 300 + ".jsonl",
    "out.txt",
    "/proc/none/out.jsonl",
]
"""Paths at which nothing can be written, or not JSONL, or the input stands."""


@pytest.mark.parametrize("name", [*MADE, *NAMED])
def test_an_output_that_is_never_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(ROWS)
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    out = tmp_path / ("out.jsonl" if name in MADE else name.replace("FOLDER", tmp_path.name))
    if name in MADE:
        MADE[name](tmp_path, out)
    before = listing(tmp_path)
    for overwrite in ([], ["--overwrite"]):
        refused("score", tmp_path / "in.jsonl", "--out", out, *overwrite)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "empty file", "link", "dangling link"])
def test_what_exists_is_replaced_only_when_asked(kind: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(ROWS)
    out, target = tmp_path / "out.jsonl", tmp_path / "precious.jsonl"
    if "link" in kind:
        out.symlink_to(target)
    if kind != "dangling link":
        (out if "file" in kind else target).write_text("" if "empty" in kind else "precious\n")
    before = listing(tmp_path)
    refused(
        "score", tmp_path / "in.jsonl", "--out", out, says="exists already; choose another path, or pass --overwrite"
    )
    assert listing(tmp_path) == before
    assert command("score", tmp_path / "in.jsonl", "--out", out, "--overwrite").code == 0
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [1.0, 0.0]
    assert out.is_symlink() == ("link" in kind)


def test_a_file_that_appears_while_scores_are_computed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text(ROWS)
    whole = score._scored

    def slowly(*arguments: Any) -> Any:
        yield from whole(*arguments)
        (tmp_path / "out.jsonl").write_text("of another process\n")

    monkeypatch.setattr(score, "_scored", slowly)
    refused("score", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", says="exists already")
    assert (tmp_path / "out.jsonl").read_text() == "of another process\n"


def test_a_place_that_cannot_be_written_is_found_before_anything_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text(ROWS)
    monkeypatch.setattr(durable.os, "access", lambda *_: False)  # root may write everywhere
    refused("score", tmp_path / "in.jsonl", "--out", tmp_path / "new" / "out.jsonl", says="is read-only for this user")
    assert list(listing(tmp_path)) == ["in.jsonl"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_what_the_system_refuses_is_a_sentence(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "runs/\x1b[2J")

    monkeypatch.setattr(score, "run", fails)
    said = refused("score", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
    assert said.startswith(f"mugrpo: runs/\\x1b[2J: {os.strerror(number)}; ")


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "I/O error", "x"), OSError(errno.EROFS, "no name"), ValueError("bug")]
)
def test_a_bug_is_not_hidden(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(score, "run", fails)
    with pytest.raises(type(error)):
        command("score", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")


def test_after_an_interrupt_only_what_continues_is_said_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(score, "run", interrupt)
    ended = command("score", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
    assert (ended.code, ended.err) == (130, "mugrpo: interrupted; nothing was written, the same command starts over\n")
    continuing = {one.name for one in COMMANDS if "continues" in one.interrupted}
    assert continuing == {"train", "generate", "optimize", "sweep", "eval"}


@pytest.mark.process
def test_a_file_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    """Neither in place of a library nor of a module that libraries try to import and Linux lacks (msvcrt)."""
    for name in ("json", "pyarrow", "rich", "pydantic", "psutil", "msvcrt", "winreg", "_winapi", "apex", "colorama"):
        (tmp_path / f"{name}.py").write_text("import os; os.write(2, b'imported\\n')\n")
    (tmp_path / "in.jsonl").write_text(ROWS)
    command = [sys.executable, "-m", "mugrpo_megatron", "score", "in.jsonl", "--out", "out.jsonl"]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "mean reward 0.5000" in done.stdout
