"""What a command may write: it replaces its own files, and other files only with an option."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from mugrpo_megatron.errors import UserError

KINDS = {"file": Path.is_file, "directory": Path.is_dir}


def check_output(
    path: Path,
    given: str,
    *,
    kind: Literal["file", "directory"] = "file",
    own: bool = False,
    inputs: Iterable[Path] = (),
    remedy: str = "choose another path",
) -> None:
    """Raise UserError, before any work is done, when a command must not write `path`.

    Allowed are a path where nothing is yet, in a directory that can be written, and an existing regular file (or
    directory) that is the command's `own`: it wrote it, or was told to replace it. An input is never replaced, whatever
    name, hard or symbolic link leads to it; nor is a device, a pipe, or a file where a directory belongs.

    Args:
        given: what the user calls the path, such as `--out out.jsonl`; the sentence begins with it.
        remedy: the end of the sentence about something that exists and is not the command's own.
    """
    try:
        if not os.path.lexists(path):
            _check_room(path, given)
            return
        if path.exists() and not KINDS[kind](path):
            raise UserError(f"{given} exists and is not a {'regular file' if kind == 'file' else kind}")
        for one in inputs:
            if path.exists() and one.exists() and path.samefile(one):
                raise UserError(f"{given} is the input {one} itself; choose another path")
        if not own:
            raise UserError(f"{given} exists already; {remedy}")
        _check_room(path, given)
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null character, a loop of links
        raise UserError(f"{given} cannot be written ({getattr(error, 'strerror', None) or error})") from None


def make_directory(path: Path, given: str) -> None:
    """Create a directory and its parents; UserError when that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{given}: {path} cannot be created ({error.strerror})") from None


def _check_room(path: Path, given: str) -> None:
    """UserError unless the directory that holds `path`, or the nearest one that exists, can be written."""
    folder = path.resolve().parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{given} cannot be written: {folder} is not a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{given} cannot be written: {folder} is read-only for this user")
