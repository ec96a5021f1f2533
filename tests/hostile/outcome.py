"""What a command may do with any input: succeed, or refuse it in one sentence that no terminal obeys."""

from __future__ import annotations

import contextlib
import io
import tomllib
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mugrpo_megatron.cli import main
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.terminal import INVISIBLE, visible


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


def command(*arguments: object) -> Outcome:
    """Run a command in this process. An exception that leaves it, other than argparse's exit, fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(*arguments: object, says: str = "") -> str:
    """What a command says last that refuses: exit code 2 and one sentence in one line, without control characters.

    Lines before it say what was in order.
    """
    ended = command(*arguments)
    assert ended.code == 2, ended
    *before, said = ended.err.removesuffix("\n").split("\n")
    if "usage: " not in ended.err:
        assert all(line.startswith("mugrpo: ") for line in (*before, said)), ended.err
        assert harmless(said), said
        assert len(said) < 2000, said
    assert says in said, said
    return said


def harmless(said: str) -> bool:
    """Whether a terminal shows every character and obeys none; what Unicode has not assigned is shown."""
    return not any(unicodedata.category(one) in INVISIBLE for one in said.replace("\t", ""))


def answered(*arguments: object) -> Outcome:
    """A command that either does its work or refuses as `refused` wants it."""
    ended = command(*arguments)
    if ended.code:
        refused(*arguments)
    return ended


def dry_run(recipe: object, *overrides: str, code: int = 0) -> list[str]:
    """The lines beside the recipe, which alone is on stdout."""
    ended = command("train", recipe, "--dry-run", *(word for one in overrides for word in ("--set", one)))
    assert ended.code == code, ended
    assert tomllib.loads(ended.out)["run"]["dir"]
    return [line.removeprefix("mugrpo: ") for line in ended.err.splitlines()]


def sentence(act: Callable[[], object]) -> str:
    """The one sentence with which `act` refuses, as a command would print it; empty when it does not."""
    try:
        act()
    except UserError as error:
        said = visible(str(error)).replace("\n", " ")
        assert harmless(said), said
        assert len(said) < 2000, said
        return said
    return ""


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every path under a folder with its content, to compare before and after; None where it is not a regular file."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
    }
