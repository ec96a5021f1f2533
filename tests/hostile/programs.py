"""Programs that a policy may write instead of a solution: each tries to escape, to survive, to hang, or to cheat.

The right answer lies in a file, in the environment and in the memory of the process that judges, and behind sockets; a
program that reaches one of them prints it. They do no harm where they succeed: what they kill, delete or overwrite is
the test's own.
"""

from __future__ import annotations

from pathlib import Path


def _read(name: str) -> dict[str, str]:
    sections = Path(__file__).with_name(name).read_text(encoding="utf-8").split("\n### ")[1:]
    return {title: text for title, _, text in (section.partition("\n") for section in sections)}


PROGRAMS = _read("programs.txt") | {"no text": "\0\ud800\x1b]0;owned\x07"}
"""What each does -> its text. They know ANSWER_FILE, PORT, SOCKET, ABSTRACT, JUDGE (a pid), MARKER (a file's name) and
PLACES (directories in which they may leave it)."""

FUNCTIONS = _read("functions.txt")
"""The same for programs of which one function, `f`, is called."""
