"""stdout and stderr of a long command that goes on when their reader ends, as in `mugrpo train RECIPE | tee log`."""

from __future__ import annotations

import errno
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TextIO, cast

DISCONNECTED = (errno.EPIPE, errno.EIO)
"""A pipe without a reader, and a terminal that is no longer there."""


class TolerantStream:
    """A text stream whose writes do not raise: what cannot be written is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text; returns its length, as if it were written, whatever happens."""
        with self._tried():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._tried():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _tried(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in DISCONNECTED:  # else Python fails when it flushes the stream at its end
                with suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self._stream.fileno())
                    os.close(nowhere)


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """In the block, nothing that is printed raises because its reader has ended."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", TolerantStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that a terminal obeys instead of showing: control, format (text direction), line separators."""
ALLOWED = "\n\t"


def visible(text: str) -> str:
    r"""`text` with every control character as an escape such as `\x1b`; newlines and tabs stay.

    A terminal obeys escape sequences: they set its title, clear it, or write to the clipboard.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escape, text))


@cache
def _escape(character: str) -> str:
    if unicodedata.category(character) not in INVISIBLE or character in ALLOWED:
        return character
    return character.encode("unicode_escape").decode("ascii")
