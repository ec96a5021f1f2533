"""Output to a terminal or pipe: a long command goes on if the pipe's reader ends, and no text controls the terminal."""

from __future__ import annotations

import atexit
import codecs
import errno
import locale
import logging
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TextIO, cast

from mugrpo_megatron.errors import NO_ROOM

DISCONNECTED = (errno.EPIPE, errno.EIO, *NO_ROOM)
"""The error numbers of a pipe without a reader, of a closed terminal, and of a file that may not grow."""


def in_utf8() -> None:
    """If the locale's encoding is not UTF-8, start this command again in Python's UTF-8 mode.

    The files of this project, of models and of libraries are in UTF-8; with a locale such as GBK or EUC-JP, Python
    would read them otherwise. Processes that the command starts inherit the mode.
    """
    encoding = codecs.lookup(locale.getencoding()).name
    if sys.flags.utf8_mode or encoding == "utf-8" or not sys.orig_argv:
        return
    sys.stdout.flush()
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@dataclass(slots=True)
class Ending:
    """The exit code of a command, which `main` sets when the command returns."""

    code: int = 1
    """The exit code; 1 until it is set, for an exception that nothing catches."""


@contextmanager
def ending_at_once() -> Iterator[Ending]:
    """End the process by `os._exit` once the block has ended and all exit handlers have run.

    At a normal end Python frees, object by object, what torch, sympy and transformers hold. This takes seconds, in
    which a finished command seems to hang. The system frees all of it at once.
    """
    ending = Ending()

    def leave() -> None:  # registered first, so it runs last of all exit handlers
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(ending.code)

    atexit.register(leave)
    try:
        yield ending
    except SystemExit as stop:  # argparse ends the process in this way
        ending.code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        raise


def drop_output(stream: TextIO) -> None:
    """Send the text that a stream still holds to the null device, so that Python's last flush of it succeeds."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class TolerantStream:
    """A text stream that drops a text whose writing raises OSError, instead of raising the error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text if possible; returns its length."""
        with self._ignoring_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignoring_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in DISCONNECTED:
                drop_output(self._stream)


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """In the block, drop printed text that cannot be written, as when `tee` in `mugrpo train RECIPE | tee log` ends."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", TolerantStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of control characters, format characters (text direction) and line separators."""
ALLOWED = "\n\t"


def visible(text: str) -> str:
    r"""The text with each invisible character (`INVISIBLE`) as an escape such as `\x1b`; newlines and tabs stay."""
    # Without this, a model's output could set the terminal's title, clear it, or write to the clipboard.
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escape, text))


@cache
def _escape(character: str) -> str:
    if unicodedata.category(character) not in INVISIBLE or character in ALLOWED:
        return character
    return character.encode("unicode_escape").decode("ascii")
